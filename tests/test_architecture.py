"""The rules of the code, as a walk over its syntax trees: layers, homes of libraries, sizes.

Every import counts: at the top of a file, in a function, under TYPE_CHECKING, and a module that
is named in a string (``python -m``, importlib). A violation prints as ``file:line: rule``.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "nfold"
SCRIPTS = ("benchmarks", "examples", "tools")  # not checked by mypy
ROOTS = {"__init__": "root", "__main__": "cli", "api": "api"}
VALUES = frozenset({"root", "core", "interventions"})
MEASURING = VALUES | {"data", "workloads", "telemetry", "store", "sandbox", "engines", "instrument"}
VERBS = VALUES | {"data", "workloads", "store", "launch", "analysis"}
MAY_IMPORT: dict[str, frozenset[str]] = {
    "root": frozenset({"core", "api", "engines/marks.py"}),
    "core": VALUES,
    "interventions": frozenset({"core/errors.py", "core/plan.py", "core/source_edit.py"}),
    "data": VALUES,
    "workloads": VALUES | {"data"},
    "telemetry": VALUES,
    "store": VALUES,
    "sandbox": VALUES,
    "engines": VALUES | {"data", "workloads", "instrument"},
    "instrument": VALUES | {"engines", "sandbox"},
    "launch": MEASURING,
    "analysis": VALUES | {"store"},
    "explain.result": VALUES,
    "explain": VERBS | {"explain.result"},
    "tune": VERBS | {"explain", "explain.result"},
    "bench": VERBS,
    "fieldreports": VALUES | {"store", "analysis", "bench"},
    "report": VALUES | {"store", "analysis", "fieldreports", "explain.result"},
    "api": VALUES | {"engines", "launch/handoff.py"},
    "cli": MEASURING
    | VERBS
    | {"report", "fieldreports", "bench", "explain", "explain.result", "tune", "api"},
}
"""Which layers each layer may import besides itself.

A Variant of core has the interventions as its attributes; they need the Plan and nothing above it.
"""
SUBLAYERS = ("explain/result",)
"""Folders that are a layer of their own."""

HOMES: dict[str, tuple[str, ...]] = {
    "torch": (
        "engines/torch/*",
        "engines/keras/trainer.py",
        "instrument/*",
        "workloads/torch_networks.py",
        "workloads/*/torch.py",
        "workloads/conv2d/triton_kernel.py",
        "launch/agent.py",
        "launch/rendezvous.py",
    ),
    "triton": ("workloads/conv2d/triton_kernel.py",),
    "keras": ("engines/keras/*", "workloads/keras_networks.py", "workloads/*/keras.py"),
    "tensorflow": ("engines/keras/tensorflow_*.py", "workloads/*/tensorflow.py"),
    "jax": ("engines/keras/jax_*.py", "workloads/*/jax.py"),
    "numpy": (
        "data/*",
        "workloads/*",
        "engines/*",
        "instrument/*",
        "explain/*",
        "interventions/execution/random_seed.py",
        "tune/runs/pair_series.py",
    ),
    "pyarrow": ("data/*",),
    "PIL": ("data/*",),
    "simplejpeg": ("data/packed_jpegs.py",),
    "cv2": ("data/distortion.py",),
    "torchvision": ("engines/torch/input/image_files.py",),
    "scipy": ("workloads/conv2d/*",),
    "safetensors": ("engines/torch/checkpoint.py",),
    "psutil": ("telemetry/*", "launch/*", "cli/plan_completion.py"),
    "pynvml": ("telemetry/nvml.py",),
    "sqlite3": ("store/*",),
    "altair": ("report/*",),
    "vl_convert": ("report/*",),
    "jinja2": ("report/*",),
    "markupsafe": ("report/*",),
    "rich": ("cli/*",),
    "typer": ("cli/*",),
}
"""Where a library may be imported; one that is not listed has no home at all."""

SAME_MEANING = {
    "torch": "a workload in PyTorch",
    "keras": "a workload in Keras",
    "framework": "an engine's side of the interface",
    "trainer": "an engine's training loop",
    "preprocessing": "an engine's image augmentation",
    "distortion": "Inception's image distortion, on the CPU and on the device",
}
"""Module names that stand in several folders because they mean the same in each."""

NOT_COUNTED = ("__pycache__", "__init__.py", "__main__.py", "py.typed")
"""Entries of folders that packages have for Python, or for type checkers."""

IN_STRING = re.compile(r"nfold(\.[a-z_0-9]+)+")
PATH_IN_TEXT = re.compile(r"(?<![\w.\-/])nfold(?:\.[a-z_0-9]+)+(?![\w-])")
NOT_MODULES = frozenset({"nfold.db", "nfold.toml", "nfold.patch"})


@dataclass(frozen=True)
class Module:
    """One source file: where it is in its package, its lines, its tree."""

    file: Path
    place: str
    lines: int
    tree: ast.Module

    @property
    def layer(self) -> str:
        for folder in SUBLAYERS:
            if self.place.startswith(f"{folder}/"):
                return folder.replace("/", ".")
        top, _, rest = self.place.partition("/")
        return top if rest else ROOTS.get(top.removesuffix(".py"), "root")

    def at(self, line: int, rule: str) -> str:
        return f"{self.file}:{line}: {rule}"


@dataclass
class Package:
    """All modules of a package called nfold, wherever it lies."""

    root: Path
    modules: list[Module] = field(init=False)

    def __post_init__(self) -> None:
        self.modules = [self._read(file) for file in sorted(self.root.rglob("*.py"))]

    def _read(self, file: Path) -> Module:
        text = file.read_text()
        place = file.relative_to(self.root).as_posix()
        return Module(file, place, len(text.splitlines()), ast.parse(text))

    def names_something(self, dotted: str) -> bool:
        """Whether ``nfold.a.b`` is a module, a folder or a name in a module."""
        if dotted in NOT_MODULES or self.root.joinpath(*dotted.split(".")[1:]).is_dir():
            return True
        place = self.place(dotted)
        if place is None or place == "__init__.py":
            return dotted.split(".")[1] in (self.root / "__init__.py").read_text()
        name = dotted.split(".")[-1]
        return place.endswith(f"{name}.py") or name in (self.root / place).read_text()

    def place(self, dotted: str) -> str | None:
        """The file behind ``nfold.a.b``; of ``nfold.a.name``, that of ``nfold.a``."""
        parts = dotted.split(".")[1:]
        while parts:
            path = "/".join(parts)
            if (self.root / f"{path}.py").exists():
                return f"{path}.py"
            if (self.root / path).is_dir():
                return f"{path}/__init__.py"
            parts.pop()
        return None


@functools.cache
def source_package() -> Package:
    return Package(SOURCE)


def imports(module: Module, *, in_strings: bool = True) -> Iterator[tuple[int, str]]:
    """Every (line, dotted name) that a module imports or names in a string."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(module, node)
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif in_strings and isinstance(node, ast.Constant) and isinstance(node.value, str):
            named = IN_STRING.fullmatch(node.value.partition(":")[0])
            if named:
                yield node.lineno, named[0]


def _absolute(module: Module, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    package = ["nfold", *module.place.split("/")[:-1]]
    kept = package[: len(package) - node.level + 1]
    return ".".join([*kept, *([node.module] if node.module else [])])


def layer_violations(package: Package) -> Iterator[str]:
    for module in package.modules:
        allowed = MAY_IMPORT.get(module.layer, frozenset()) | {module.layer}
        if module.layer not in MAY_IMPORT:
            yield module.at(1, f"{module.layer!r} is no layer; layers are {', '.join(MAY_IMPORT)}")
        for line, name in imports(module):
            place = package.place(name) if name.split(".")[0] == "nfold" else None
            if place is None or place in allowed:
                continue
            layer = Module(Path(), place, 0, module.tree).layer
            if layer not in allowed:
                rule = f"layer {module.layer!r} imports {name}; it may import {sorted(allowed)}"
                yield module.at(line, rule)


def home_violations(package: Package) -> Iterator[str]:
    for module in package.modules:
        for line, name in imports(module):
            library = name.split(".")[0]
            homeless = library not in {*HOMES, "nfold", *sys.stdlib_module_names}
            homes = HOMES.get(library, ())
            if homeless or (homes and not any(fnmatch(module.place, home) for home in homes)):
                yield module.at(line, f"imports {library}, whose home is {', '.join(homes)}")


WALL_CLOCKS = ("time", "time_ns", "localtime", "gmtime", "ctime")
FORMATTED = ("isoformat", "strftime")


def wall_clock_violations(package: Package) -> Iterator[str]:
    """Find times of the wall clock, which may jump, other than those that are only written."""
    for module in package.modules:
        formatted = {
            id(node.value)
            for node in ast.walk(module.tree)
            if isinstance(node, ast.Attribute) and node.attr in FORMATTED
        }
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ImportFrom) and node.module in ("time", "datetime"):
                names = {alias.name for alias in node.names} - {"timedelta"}
                yield from (module.at(node.lineno, f"imports {name}") for name in names)
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            owner, name = ast.unparse(node.func.value), node.func.attr
            wall = owner == "time" and name in WALL_CLOCKS
            date = owner.startswith("datetime") and name in ("now", "utcnow", "today")
            where = module.at(node.lineno, f"{owner}.{name}() may jump; use time.monotonic()")
            # The sandbox compares with the times of files, which the wall clock gives.
            if (wall and "/sandbox/" not in where) or (date and id(node) not in formatted):
                yield where


def show(violations: Iterator[str]) -> str:
    return "\n".join(violations)


def test_layers_import_downwards_only() -> None:
    assert show(layer_violations(source_package())) == ""


def test_libraries_stay_in_their_homes() -> None:
    assert show(home_violations(source_package())) == ""


def missing_paths(package: Package) -> Iterator[str]:
    """Yield dotted module paths in strings, whole or in a command, that name nothing."""
    for module in package.modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                for found in PATH_IN_TEXT.finditer(node.value):
                    if not package.names_something(found[0]):
                        yield module.at(node.lineno, f"{found[0]} does not exist")


def missing_imports(package: Package, scripts: Iterable[Path]) -> Iterator[str]:
    """Yield imports of the package, in scripts outside of it, that name nothing."""
    for file in scripts:
        script = Module(file, file.name, 0, ast.parse(file.read_text()))
        for line, name in imports(script, in_strings=False):
            if name.startswith("nfold.") and not package.names_something(name):
                yield script.at(line, f"{name} does not exist")


def repeated_classes(package: Package) -> Iterator[str]:
    """Yield classes whose name another class of the package has."""
    seen: dict[str, str] = {}
    for module in package.modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                if node.name in seen:
                    yield module.at(node.lineno, f"class {node.name} is in {seen[node.name]} too")
                seen[node.name] = module.place


def repeated_modules(package: Package) -> Iterator[str]:
    """Yield module names that mean different things in different folders."""
    places: dict[str, list[str]] = {}
    for module in package.modules:
        places.setdefault(module.file.stem, []).append(module.place)
    for name, found in places.items():
        if len(found) > 1 and name != "__init__" and name not in SAME_MEANING:
            yield f"{name}: {', '.join(found)}"


MAX_PUBLIC_MEMBERS = 12
LARGE_CLASSES = (
    "Intervention",  # declarations and hooks with defaults: one object per intervention
    "Interventions",  # one attribute per intervention
    "UserRun",  # the public interface of nfold.Run
)
"""Classes that have more public members."""


def large_classes(package: Package) -> Iterator[str]:
    """Yield classes with many public members: methods, properties and class attributes.

    Fields of instances and inherited members do not count.
    """
    for module in package.modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef) and node.name not in LARGE_CLASSES:
                count = len({name for name in _member_names(node) if not name.startswith("_")})
                if count > MAX_PUBLIC_MEMBERS:
                    yield module.at(node.lineno, f"{node.name} has {count} public members")


def _member_names(node: ast.ClassDef) -> Iterator[str]:
    for each in node.body:
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
            yield each.name
        elif isinstance(each, ast.Assign):
            yield from map(ast.unparse, each.targets)
        elif isinstance(each, ast.AnnAssign) and "ClassVar" in ast.unparse(each.annotation):
            yield ast.unparse(each.target)


def import_cycle(package: Package) -> list[str]:
    """Return the files of one import cycle, empty if there is none; lazy imports count."""
    graph = {
        module.place: {
            place
            for _, name in imports(module, in_strings=False)
            if name.split(".")[0] == "nfold" and (place := package.place(name))
        }
        - {module.place}
        for module in package.modules
        if module.file.name != "__init__.py"
    }
    done: set[str] = set()

    def visit(place: str, path: list[str]) -> list[str]:
        if place in path:
            return path[path.index(place) :]
        if place in done or place not in graph:
            return []
        for other in sorted(graph[place]):
            if found := visit(other, [*path, place]):
                return found
        done.add(place)
        return []

    return next((found for place in sorted(graph) if (found := visit(place, []))), [])


def test_every_module_path_in_a_string_exists() -> None:
    assert show(missing_paths(source_package())) == ""


def test_scripts_import_what_exists() -> None:
    scripts = [file for folder in SCRIPTS for file in (ROOT / folder).rglob("*.py")]
    assert show(missing_imports(source_package(), scripts)) == ""


def test_class_names_are_unique() -> None:
    assert show(repeated_classes(source_package())) == ""


def test_module_names_are_unique() -> None:
    assert show(repeated_modules(source_package())) == ""


def test_no_class_has_many_public_members() -> None:
    assert show(large_classes(Package(SOURCE))) == ""


def test_there_is_no_import_cycle() -> None:
    assert import_cycle(source_package()) == []


def test_every_layer_and_home_exists() -> None:
    for layer in MAY_IMPORT:
        place = {"root": "__init__.py", "api": "api.py"}.get(layer, layer.replace(".", "/"))
        assert (SOURCE / place).exists(), layer
    places = [module.place for module in source_package().modules]
    for homes in HOMES.values():
        for home in homes:
            assert any(fnmatch(place, home) for place in places), home


def test_folders_are_small() -> None:
    folders = [SOURCE, *(path for path in SOURCE.rglob("*") if path.is_dir())]
    for folder in folders:
        entries = [e for e in folder.iterdir() if e.name not in NOT_COUNTED]
        assert len(entries) <= 20, folder


def test_no_duration_is_from_the_wall_clock() -> None:
    assert show(wall_clock_violations(source_package())) == ""


@pytest.mark.parametrize(
    "text",
    [
        "import time\nstarted = time.time()\n",
        "import time\nclock = time.time_ns\nat = time.time_ns()\n",
        "import datetime\nstarted = datetime.datetime.now(datetime.UTC)\n",
        "import json\nfrom time import time\n",
    ],
)
def test_a_wall_clock_is_found(planted: Path, text: str) -> None:
    (planted / "core/plan.py").write_text(text)
    assert len(list(wall_clock_violations(Package(planted)))) == 1
    stamp = "import datetime\nstamp = datetime.datetime.now(datetime.UTC).isoformat()\n"
    (planted / "core/plan.py").write_text(stamp)
    assert show(wall_clock_violations(Package(planted))) == ""


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """A small package that keeps every rule; tests break one at a time."""
    places = ("core/plan.py", "launch/handoff.py", "launch/run.py", "engines/torch/loop.py")
    for place in (*places, "launch/__init__.py", "engines/torch/__init__.py", "api.py"):
        file = tmp_path / "nfold" / place
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("import json\n")
    assert show(layer_violations(Package(tmp_path / "nfold"))) == ""
    return tmp_path / "nfold"


@pytest.mark.parametrize(
    ("place", "text", "line"),
    [
        ("core/plan.py", "import nfold.launch.run\n", 1),
        ("core/plan.py", "def f():\n    from nfold.engines.torch import loop\n", 2),
        ("core/plan.py", "if TYPE_CHECKING:\n    from nfold import launch\n", 2),
        ("core/plan.py", "from ..launch import run\n", 1),
        ("core/plan.py", "HOME = 'nfold.launch.run:main'\n", 1),
        ("engines/torch/loop.py", "from ...launch import handoff\n", 1),
        ("api.py", "import json\nfrom nfold.launch.run import run\n", 2),
        ("utils/text.py", "import json\n", 1),
    ],
)
def test_an_upward_import_is_found(planted: Path, place: str, text: str, line: int) -> None:
    (planted / place).parent.mkdir(exist_ok=True)
    (planted / place).write_text(text)
    (violation,) = layer_violations(Package(planted))
    assert violation.startswith(f"{planted / place}:{line}: ")


def test_the_api_may_import_the_handoff(planted: Path) -> None:
    (planted / "api.py").write_text("from nfold.launch.handoff import Folder\n")
    assert show(layer_violations(Package(planted))) == ""


@pytest.mark.parametrize("text", ["import torch\n", "def f():\n    import requests\n"])
def test_a_library_outside_its_home_is_found(planted: Path, text: str) -> None:
    (planted / "core/plan.py").write_text(text)
    (planted / "engines/torch/loop.py").write_text("import torch\n")
    (violation,) = home_violations(Package(planted))
    assert violation.startswith(f"{planted / 'core/plan.py'}:{len(text.splitlines())}: imports ")


def test_a_path_that_does_not_exist_is_found(planted: Path) -> None:
    (planted / "core/plan.py").write_text("A = 'python -m nfold.launch.gone'\nB = 'nfold.launch'\n")
    (violation,) = missing_paths(Package(planted))
    assert "nfold.launch.gone" in violation


def test_an_import_of_nothing_is_found(planted: Path, tmp_path: Path) -> None:
    (planted / "core/__init__.py").touch()
    script = tmp_path / "script.py"
    script.write_text("from nfold.core.plan import json, Gone\nfrom nfold.core.gone import json\n")
    found = missing_imports(Package(planted), [script])
    assert [each.rpartition(": ")[2].split()[0] for each in found] == [
        "nfold.core.plan.Gone",
        "nfold.core.gone.json",
    ]


@pytest.mark.parametrize("member", ["@property\n    def m{0}(self): ...", "m{0} = 1"])
def test_a_class_with_many_public_members_is_found(planted: Path, member: str) -> None:
    for count, found in ((12, 0), (13, 1)):
        members = "\n    ".join(member.format(n) for n in range(count))
        fields = "_private = 1\n    field: int = 1"
        (planted / "core/plan.py").write_text(f"class Plan:\n    {fields}\n    {members}\n")
        assert len(list(large_classes(Package(planted)))) == found


def test_a_cycle_and_a_repeated_class_are_found(planted: Path) -> None:
    (planted / "core/plan.py").write_text("from nfold.core import other\nclass Plan: ...\n")
    (planted / "core/other.py").write_text("from nfold.core import plan\nclass Plan: ...\n")
    package = Package(planted)
    assert set(import_cycle(package)) == {"core/plan.py", "core/other.py"}
    assert len(list(repeated_classes(package))) == 1
