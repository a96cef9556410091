"""What makes a script what it is, read without running it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from nfold.core.fingerprint import (
    MAX_HASHED_BYTES,
    compute_fingerprint,
    imported_file,
    library_variables,
    module_file,
)

Change = Callable[[Path], object]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A script that imports a module and a package of the user's, and reads two files."""
    files = {
        "train.py": (
            "import os, torch, net\n"
            "from models.deep import make\n"
            "import importlib\n"
            "loss = importlib.import_module('losses')\n"
            "settings = open('settings.yaml').read()\n"
            "rate = os.environ.get('RATE', '0.1')\n"
        ),
        "net.py": "try: import extra; import json\nexcept ImportError: pass\n",
        "extra.py": "VALUE = 1\n",
        "losses.py": "VALUE = 1\n",
        "models/__init__.py": "",
        "models/deep.py": "from . import parts\n",
        "models/parts.py": "VALUE = 1\n",
        "settings.yaml": "depth: 3\n",
        "run.toml": "seed = 1\n",
        "data.bin": "x" * (MAX_HASHED_BYTES + 1),
        "other.py": "VALUE = 1\n",
        "json.txt": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def of(project: Path, **environment: str) -> str:
    arguments = ("--config=run.toml", "--data", "data.bin", "--lr", "0.1")
    return compute_fingerprint(str(project / "train.py"), arguments, environment)


def appended(name: str) -> Change:
    def change(folder: Path) -> None:
        with (folder / name).open("a") as file:
            file.write("\n")

    return change


def touched(folder: Path) -> None:
    """Another date, as what is written anew has."""
    about = (folder / "data.bin").stat()
    os.utime(folder / "data.bin", ns=(about.st_atime_ns, about.st_mtime_ns + 1))


@pytest.mark.parametrize(
    ("search", "where"),
    [
        ("import sys; sys.path.append('..')", ""),
        ("import sys; sys.path.append(str(Path(__file__).parents[1]))", ""),
        ("sys.path.insert(0, os.path.join(os.path.dirname(__file__), '../common'))", "common/"),
        ("ROOT = Path(__file__).parents[1]\nsys.path.append(\n str(ROOT/'common'))", "common/"),
        ("from paths import root", "common/"),
    ],
)
def test_modules_in_folders_that_a_script_adds_are_part_of_it(
    search: str, where: str, tmp_path: Path
) -> None:
    """In whatever order they are imported, and the folders added."""
    files = {
        "work/train.py": f"import shared, absent, torch\n{search}\nimport inner.deep\n",
        "work/paths.py": "import sys; root = sys.path.append('../common')",
        f"{where}shared.py": "import another",
        f"{where}another.py": "",
        f"{where}inner/__init__.py": "",
        f"{where}inner/deep.py": "",
        f"{where}unused.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(text)

    def now() -> str:
        return compute_fingerprint(str(tmp_path / "work/train.py"), (), {})

    told = [before := now()]
    appended(f"{where}unused.py")(tmp_path)
    assert now() == before
    for name in ("shared", "another", "inner/__init__", "inner/deep"):
        appended(f"{where}{name}.py")(tmp_path)
        told.append(now())
    assert len(set(told)) == len(told)


@pytest.mark.parametrize(
    "change",
    [
        *map(appended, ("train.py", "net.py", "extra.py", "losses.py")),
        *map(appended, ("models/__init__.py", "models/deep.py", "models/parts.py")),
        *map(appended, ("settings.yaml", "run.toml", "data.bin")),
        touched,
        lambda folder: (folder / "models/added.py").write_text(""),
        lambda folder: (folder / "run.toml").unlink(),
    ],
)
def test_the_fingerprint_depends_on_its_parts(project: Path, change: Change) -> None:
    before = of(project)
    assert len(before) == 16
    assert of(project) == before
    change(project)
    assert of(project) != before


@pytest.mark.parametrize(
    "change",
    [
        appended("other.py"),
        appended("json.txt"),
        lambda folder: (folder / "models/notes.txt").write_text(""),
        lambda folder: (folder / "models/__pycache__").mkdir(),
    ],
)
def test_the_fingerprint_ignores_everything_else(project: Path, change: Change) -> None:
    before = of(project)
    change(project)
    assert of(project) == before


def test_variables_count_that_the_code_names_or_that_libraries_read(project: Path) -> None:
    bare = of(project)
    message = [of(project, **{name: "2"}) for name in ("RATE", "NCCL_ALGO", "OMP_NUM_THREADS")]
    assert len({bare, *message, of(project, RATE="3")}) == 5
    assert of(project, EDITOR="vi", TERM="dumb", NFOLD_DATA="here", NCCL_DEBUG="INFO") == bare


def test_variables_of_libraries_are_recognized_by_name() -> None:
    steer = {"OMP_NUM_THREADS": "4", "NCCL_ALGO": "Ring", "TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    talk = {"CUDA_HOME": "/cuda", "TORCH_CPP_LOG_LEVEL": "3", "NCCL_DEBUG_FILE": "a", "HOME": "b"}
    others = {"TF_VAR_password": "c", "TF_CLI_CONFIG_FILE": "d", "HF_TOKEN": "e"}
    assert library_variables(steer | talk | others) == tuple(sorted(steer.items()))


def test_a_folder_that_hides_a_library_is_the_user_s(project: Path) -> None:
    (project / "json.py").write_text("VALUE = 1\n")
    before = of(project)
    appended("json.py")(project)
    assert of(project) != before


def test_a_package_that_is_installed_from_where_it_is_developed_is_the_user_s(
    project: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path_factory.mktemp("developed")
    (elsewhere / "models_of_mine").mkdir()
    (elsewhere / "models_of_mine/__init__.py").write_text("")
    monkeypatch.setattr(sys, "path", [*sys.path, str(elsewhere)])
    appended("other.py")(project)
    (project / "train.py").write_text("from models_of_mine.net import make\n")
    before = of(project)
    (elsewhere / "models_of_mine/net.py").write_text("")
    assert of(project) != before


def test_a_module_is_found_as_python_finds_it(project: Path) -> None:
    (project / "models/__main__.py").write_text("")
    (project / "loose/inner").mkdir(parents=True)
    (project / "loose/inner/run.py").write_text("")
    found = {
        name: module_file(name, str(project))
        for name in ("train", "models", "models.deep", "loose.inner.run")
    }
    files = ("train.py", "models/__main__.py", "models/deep.py", "loose/inner/run.py")
    assert [*found.values()] == [str(project / file) for file in files]
    for name in ("gone", "models.gone", "train.deep", "loose", "loose.inner", "sys", "a..b", ""):
        assert module_file(name, str(project)) is None
    assert "models" not in sys.modules


def test_a_package_is_imported_by_its_first_file(project: Path) -> None:
    files = {"train": "train.py", "models": "models/__init__.py", "models.deep": "models/deep.py"}
    for name, file in files.items():
        assert imported_file(name, str(project)) == str(project / file)
    for name in ("gone", "models.gone", "sys"):
        assert imported_file(name, str(project)) is None
    assert "models" not in sys.modules


def test_code_that_cannot_be_read_or_is_not_python_stops_nothing(project: Path) -> None:
    (project / "net.py").write_bytes(b"import extra\n\xff\xfe def (\0")
    (project / "extra.py").unlink()
    os.symlink("nowhere.py", project / "extra.py")
    assert len(of(project)) == 16
    with pytest.raises(OSError, match="missing"):
        compute_fingerprint(str(project / "missing.py"), (), {})


def test_modules_that_import_each_other_end(project: Path) -> None:
    (project / "extra.py").write_text("import net, train\n")
    assert of(project) == of(project)
