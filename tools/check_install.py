"""Check that the wheel is complete and that it installs and runs in fresh environments.

    python tools/check_install.py [--python 3.11,3.12,3.13] [--torch 2.13.0]

Builds the wheel from the tracked files and compares its requirements with REQUIREMENTS. Installs it
with all requirements on Python 3.11, once per torch version, and with ``--no-deps`` and the
requirements other than torch on newer versions. Runs ``nfold --help`` and ``nfold env``, and with
torch a short benchmark. Prints a table and exits with 1 if a check failed.
"""

from __future__ import annotations

import argparse
import email
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ("numpy", "nvidia-ml-py", "psutil", "rich", "safetensors", "torch", "typer")
DATA_FILES = (
    "py.typed",
    "store/schema.sql",
    "data/digits.npz",
    "data/LICENSE-digits.md",
)
TEMPLATES = "src/nfold/report/templates"
TORCH_PYTHON = "3.11"  # the Python version that torch is installed for
BENCHMARK = ("bench", "digits", "--devices", "cpu:1,cpu:2", "--steps", "20")
TIMEOUT_S = 1800

# Prints the installed distributions, and the transitive requirements of those in argv[1:].
CLOSURE = """
import importlib.metadata as m, json, re, sys
from pip._vendor.packaging.requirements import Requirement
key = lambda name: re.sub(r"[-_.]+", "-", name).lower()
needed, queue = set(), [(name, "") for name in sys.argv[1:]]
while queue:
    name, extra = queue.pop()
    if (key(name), extra) in needed:
        continue
    needed.add((key(name), extra))
    for text in m.requires(name) or []:
        r = Requirement(text)
        if not r.marker or r.marker.evaluate({"extra": extra}):
            queue += [(r.name, e) for e in ("", *r.extras)]
installed = {key(d.metadata["Name"]) for d in m.distributions()}
print(json.dumps([sorted(installed), sorted({name for name, _ in needed})]))
"""


class CheckFailed(Exception):
    """A check failed; the message says which."""


@dataclass(kw_only=True)
class Environment:
    """One fresh environment and the results of its checks."""

    python: str
    torch: str | None
    results: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The row of the table."""
        return f"Python {self.python}, {f'torch {self.torch}' if self.torch else 'without torch'}"


def main() -> int:
    """Run all checks and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--python", default="3.11,3.12,3.13", help="Python versions")
    parser.add_argument("--torch", default="2.13.0", help=f"torch versions on {TORCH_PYTHON}")
    arguments = parser.parse_args()
    environments = [
        Environment(python=python, torch=torch)
        for python in arguments.python.split(",")
        for torch in (arguments.torch.split(",") if python == TORCH_PYTHON else [None])
    ]
    with tempfile.TemporaryDirectory(prefix="nfold-install-") as folder:
        try:
            wheel = build_wheel(Path(folder))
            check_contents(wheel)
            check_requirements(wheel)
        except CheckFailed as error:
            print(f"wheel: {error}")
            return 1
        print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB, complete")
        for environment in environments:
            check_environment(environment, wheel, Path(folder))
    print_table(environments)
    return int(any(text.startswith("failed") for e in environments for text in e.results.values()))


def build_wheel(folder: Path) -> Path:
    """Build the wheel from a copy of the tracked files."""
    source = folder / "source"
    files = run(["git", "ls-files", "-z"], cwd=ROOT).split("\0")
    for name in filter(None, files):
        if name.startswith("src/") or "/" not in name:
            target = source / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / name).read_bytes())
    run([sys.executable, "-m", "venv", str(folder / "build")])
    python = folder / "build/bin/python"
    run([str(python), "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder), str(source)])
    (wheel,) = folder.glob("nfold-*.whl")
    return wheel


def check_contents(wheel: Path) -> None:
    """Raise CheckFailed unless the wheel has every tracked module, template and data file."""
    tracked = run(["git", "ls-files", "-z", "src/nfold"], cwd=ROOT).split("\0")
    modules = {name.removeprefix("src/") for name in tracked if name.endswith(".py")}
    templates = {name.removeprefix("src/") for name in tracked if name.startswith(TEMPLATES)}
    expected = modules | templates | {f"nfold/{name}" for name in DATA_FILES}
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    if not templates or expected - names:
        raise CheckFailed(f"missing files: {', '.join(sorted(expected - names)) or TEMPLATES}")
    if not any(name.endswith("licenses/LICENSE") for name in names):
        raise CheckFailed("missing licence")


def check_requirements(wheel: Path) -> None:
    """Raise CheckFailed unless the requirements without extras are REQUIREMENTS."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    required = {
        normalize(re.split(r"[^\w.-]", text)[0])
        for text in metadata.get_all("Requires-Dist", [])
        if "extra ==" not in text
    }
    if required != set(REQUIREMENTS):
        raise CheckFailed(f"requires {sorted(required)}; allowed are {list(REQUIREMENTS)}")


def check_environment(environment: Environment, wheel: Path, folder: Path) -> None:
    """Install the wheel into a fresh environment and run the commands."""
    results = environment.results
    interpreter = find_python(environment.python)
    if interpreter is None:
        results["install"] = "not checked: no such Python"
        return
    venv = folder / f"venv-{environment.python}-{environment.torch}"
    python, nfold = str(venv / "bin/python"), str(venv / "bin/nfold")
    install = [python, "-m", "pip", "install", "-q", "--no-cache-dir"]
    commands = {"nfold --help": ["--help"], "nfold env": ["env"], "nfold bench": [*BENCHMARK]}
    try:
        run([interpreter, "-m", "venv", str(venv)])
        if environment.torch:
            run([*install, f"torch=={environment.torch}", str(wheel)])
            results["install"] = check_installed(python)
        else:
            run([*install, "--no-deps", str(wheel)])
            run([*install, *(name for name in REQUIREMENTS if name != "torch")])
            results["install"] = "ok, without torch"
            results["nfold bench"] = "not checked: needs torch"
    except (CheckFailed, subprocess.TimeoutExpired) as error:
        results["install"] = f"failed: {error}"
        return
    work = venv / "work"
    work.mkdir()
    for name, command in commands.items():
        if name not in results:
            try:
                run([nfold, *command], cwd=work)
                results[name] = "ok"
            except (CheckFailed, subprocess.TimeoutExpired) as error:
                results[name] = f"failed: {error}"


def check_installed(python: str) -> str:
    """Raise CheckFailed if something other than the transitive requirements is installed."""
    installed, needed = json.loads(run([python, "-c", CLOSURE, "nfold"]))
    extra = set(installed) - set(needed) - {"pip", "setuptools"}
    if extra:
        raise CheckFailed(f"installs {', '.join(sorted(extra))}, which nothing requires")
    return f"ok, {len(REQUIREMENTS)} requirements, {len(set(installed) & set(needed)) - 1} packages"


def find_python(version: str) -> str | None:
    """Return an interpreter from pyenv's versions or PATH."""
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    candidates = [str(path) for path in sorted(root.glob(f"versions/{version}.*/bin/python"))]
    for candidate in (*reversed(candidates), f"python{version}"):
        try:
            text = "import sys, ensurepip; print('%d.%d' % sys.version_info[:2])"
            if run([candidate, "-c", text]).strip() == version:
                return candidate
        except (OSError, CheckFailed):
            continue
    return None


def run(command: list[str], cwd: Path | None = None) -> str:
    """Run a command and return its output; raises CheckFailed with its last lines."""
    variables = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        command, cwd=cwd, env=variables, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    if done.returncode:
        lines = (done.stderr.strip() or done.stdout.strip()).splitlines()[-3:]
        name = " ".join([Path(command[0]).name, *command[1:3]])
        raise CheckFailed(f"{name} exited with code {done.returncode}: {' | '.join(lines)}")
    return done.stdout


def normalize(name: str) -> str:
    """Return a distribution's name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def print_table(environments: list[Environment]) -> None:
    """Print one row per environment in Markdown."""
    columns = ("install", "nfold --help", "nfold env", "nfold bench")
    print(f"\n| environment | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}")
    for environment in environments:
        cells = (environment.results.get(name, "not checked") for name in columns)
        print(f"| {environment.name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    sys.exit(main())
