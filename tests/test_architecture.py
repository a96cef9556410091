"""The rules of the code, as a walk over its syntax trees: layers, homes of libraries, sizes.

Every import counts: at the top of a file, in a function, under TYPE_CHECKING, and a module that
is named in a string (``python -m``, importlib). A violation prints as ``file:line: rule``.
"""

from __future__ import annotations

import ast
import re
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "src" / "nfold"
ROOTS = {"__init__": "root", "__main__": "cli", "api": "api"}
NOUNS = frozenset({"nouns", "root"})
BELOW_RUN = NOUNS | {"workloads", "data", "frameworks", "telemetry", "store"}
VERBS = NOUNS | {"workloads", "data", "store", "run"}
MAY_IMPORT: dict[str, frozenset[str]] = {
    "root": frozenset({"nouns", "api"}),
    "nouns": NOUNS,
    "workloads": NOUNS,
    "data": NOUNS,
    "frameworks": NOUNS | {"workloads", "data"},
    "telemetry": NOUNS,
    "store": NOUNS,
    "run": BELOW_RUN,
    "report": NOUNS | {"store"},
    "bench": VERBS,
    "explain": VERBS,
    "tune": VERBS,
    "compare": VERBS,
    "api": NOUNS | {"frameworks", "run/handoff.py"},
    "cli": BELOW_RUN | {"run", "report", "bench", "explain", "tune", "compare", "api"},
}
"""Which layers each layer may import besides itself. A top-level module is a noun."""

HOMES: dict[str, tuple[str, ...]] = {
    "torch": (
        "frameworks/torch/*",
        "frameworks/keras/on_torch.py",
        "workloads/torch.py",
        "workloads/*/torch.py",
        "workloads/conv2d/cpu.py",
        "workloads/conv2d/cuda.py",
        "workloads/conv2d/kernel.py",
        "run/agent.py",
    ),
    "triton": ("workloads/conv2d/kernel.py",),
    "keras": ("frameworks/keras/*", "workloads/keras.py", "workloads/*/keras.py"),
    "tensorflow": (
        "frameworks/keras/on_tensorflow.py",
        "frameworks/keras/replicas.py",
        "workloads/*/tensorflow.py",
    ),
    "jax": (
        "frameworks/keras/on_jax.py",
        "frameworks/keras/jax_devices.py",
        "workloads/*/jax.py",
    ),
    "numpy": ("data/*", "workloads/*", "frameworks/*"),
    "pyarrow": ("data/*",),
    "PIL": ("data/*",),
    "simplejpeg": ("data/decode.py",),
    "cv2": ("data/distortion.py",),
    "torchvision": ("frameworks/torch/nvjpeg.py",),
    "scipy": ("workloads/conv2d/*",),
    "safetensors": ("frameworks/torch/checkpoint.py",),
    "psutil": ("telemetry/*", "run/*"),
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

FILE_LINES = 300
FUNCTION_LINES = 40
MEDIAN_LINES = 10
LONGER: dict[str, str] = {
    "run/agent.py:_register_loopback": (
        "a class whose base only torch has; torch is imported after the agent's lifeline is tied"
    ),
    "cli/bench.py:command": "its signature is the list of options; its body is one call",
    "cli/train.py:command": "its signature is the list of options; its body is one call",
    "cli/explain.py:command": "its signature is the list of options; its body is one call",
}
"""``file`` or ``file:function`` that may be longer than the rule, with the reason."""

IN_STRING = re.compile(r"nfold(\.[a-z_0-9]+)+")
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """One source file: where it is in its package, its lines, its tree."""

    file: Path
    place: str
    lines: int
    tree: ast.Module

    @property
    def layer(self) -> str:
        top, _, rest = self.place.partition("/")
        return top if rest else ROOTS.get(top.removesuffix(".py"), "nouns")

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


def imports(module: Module) -> Iterator[tuple[int, str]]:
    """Every (line, dotted name) that a module imports or names in a string."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(module, node)
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
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


def size_violations(package: Package, longer: dict[str, str]) -> Iterator[str]:
    needed = set()
    for module in package.modules:
        if module.lines > FILE_LINES:
            needed.add(module.place)
            if module.place not in longer:
                yield module.at(1, f"{module.lines} lines; a file has at most {FILE_LINES}")
        for function in functions(module):
            if lines_of(function) > FUNCTION_LINES:
                name = f"{module.place}:{function.name}"
                needed.add(name)
                if name not in longer:
                    rule = f"{function.name} has {lines_of(function)} lines"
                    yield module.at(function.lineno, f"{rule}; at most {FUNCTION_LINES}")
    for name in sorted(set(longer) - needed):
        yield f"{name}: is named as an exception but is no longer too long"


def functions(module: Module) -> list[Function]:
    return [node for node in ast.walk(module.tree) if isinstance(node, Function)]


def lines_of(function: Function) -> int:
    assert function.end_lineno is not None
    return function.end_lineno - function.lineno + 1


def show(violations: Iterator[str]) -> str:
    return "\n".join(violations)


def test_layers_import_downwards_only() -> None:
    assert show(layer_violations(Package(SOURCE))) == ""


def test_libraries_stay_in_their_homes() -> None:
    assert show(home_violations(Package(SOURCE))) == ""


def test_files_and_functions_are_short() -> None:
    assert show(size_violations(Package(SOURCE), LONGER)) == ""


def test_the_median_function_is_under_ten_lines() -> None:
    found = [lines_of(f) for module in Package(SOURCE).modules for f in functions(module)]
    assert statistics.median(found) < MEDIAN_LINES


def test_every_exception_has_a_reason() -> None:
    assert all(len(reason) > 20 for reason in LONGER.values())


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """A small package that keeps every rule; tests break one at a time."""
    for place in ("plan.py", "run/handoff.py", "run/run.py", "frameworks/torch/loop.py"):
        file = tmp_path / "nfold" / place
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("import json\n")
    assert show(layer_violations(Package(tmp_path / "nfold"))) == ""
    return tmp_path / "nfold"


@pytest.mark.parametrize(
    ("place", "text", "line"),
    [
        ("plan.py", "import nfold.run.run\n", 1),
        ("plan.py", "def f():\n    from nfold.frameworks.torch import loop\n", 2),
        ("plan.py", "if TYPE_CHECKING:\n    from nfold import run\n", 2),
        ("plan.py", "from . import run\n", 1),
        ("plan.py", "HOME = 'nfold.run.run:main'\n", 1),
        ("frameworks/torch/loop.py", "from ...run import handoff\n", 1),
        ("api.py", "import json\nfrom nfold.run.run import run\n", 2),
        ("utils/text.py", "import json\n", 1),
    ],
)
def test_an_upward_import_is_found(planted: Path, place: str, text: str, line: int) -> None:
    (planted / place).parent.mkdir(exist_ok=True)
    (planted / place).write_text(text)
    (violation,) = layer_violations(Package(planted))
    assert violation.startswith(f"{planted / place}:{line}: ")


def test_the_api_may_use_the_hand_over(planted: Path) -> None:
    (planted / "api.py").write_text("from nfold.run.handoff import Folder\n")
    assert show(layer_violations(Package(planted))) == ""


@pytest.mark.parametrize("text", ["import torch\n", "def f():\n    import requests\n"])
def test_a_library_outside_its_home_is_found(planted: Path, text: str) -> None:
    (planted / "plan.py").write_text(text)
    (planted / "frameworks/torch/loop.py").write_text("import torch\n")
    (violation,) = home_violations(Package(planted))
    assert violation.startswith(f"{planted / 'plan.py'}:{len(text.splitlines())}: imports ")


def test_what_is_too_long_is_found(planted: Path) -> None:
    (planted / "plan.py").write_text("def long():\n" + "    pass\n" * 40)
    (planted / "run" / "run.py").write_text("x = 1\n" * 301)
    package = Package(planted)
    assert [v.split(": ")[0] for v in size_violations(package, {})] == [
        f"{planted / 'plan.py'}:1",
        f"{planted / 'run/run.py'}:1",
    ]
    named = {"plan.py:long": "a table", "run/run.py": "a table"}
    assert show(size_violations(package, named)) == ""
    assert "no longer" in show(size_violations(package, {**named, "api.py": "gone"}))
