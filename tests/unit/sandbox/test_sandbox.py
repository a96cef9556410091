"""A script's scratch folder: it reads what is there, and what is there stays as it was."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nfold.core.source_location import error_location
from nfold.sandbox import Sandbox, WriteReport, clean_up, clean_up_stale, enter_sandbox
from nfold.sandbox.change_watcher import FileState, read_states
from nfold.sandbox.file_claims import journal_folder

State = dict[str, object]
HERE = Path("here")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a script, data, links; the working directory."""
    folder = tmp_path / "project"
    (folder / "data" / "deep").mkdir(parents=True)
    (folder / "train.py").write_text("print('hello')\n")
    (folder / "data" / "a.txt").write_text("a")
    (folder / "data" / "deep" / "b.txt").write_text("b")
    (folder / "log.txt").write_text("old\n")
    (folder / "latest").symlink_to("data")
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "x.txt").write_text("x")
    (folder / "far").symlink_to(tmp_path / "far")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


@pytest.fixture
def enter(project: Path, tmp_path: Path) -> Iterator[Callable[[], Sandbox]]:
    made: list[Sandbox] = []

    def begin() -> Sandbox:
        made.append(enter_sandbox(tmp_path / "results" / "measurements" / "m" / "scratch"))
        return made[-1]

    yield begin
    for scratch in made:
        scratch.close()


def state(folder: Path) -> State:
    """Everything below a folder: links, contents, modes."""
    found: State = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = os.readlink(path)
        else:
            found[name] = path.read_bytes() if path.is_file() else path.stat().st_mode
    return found


WRITES = {
    "a new file": "Path('out.txt').write_text('new')",
    "a file over an old one": "Path('log.txt').write_text('new')",
    "a line at the end": "open('log.txt', 'a').write('more')",
    "a file in a folder": "Path('data/deep/c.txt').write_text('new')",
    "a file through a link": "Path('latest/a.txt').write_text('new')",
    "a file through a link out": "Path('far/x.txt').write_text('new')",
    "a file above": "Path('../far/y.txt').write_text('new')",
    "up and down": "Path('data/../data/a.txt').write_text('new')",
    "folders": "Path('runs/1/2').mkdir(parents=True)",
    "a folder in a folder": "Path('data/deep/more').mkdir()",
    "a file gone": "Path('data/a.txt').unlink()",
    "a folder gone": "shutil.rmtree('data')",
    "an empty folder made and gone": "Path('data/e').mkdir(); Path('data/e').rmdir()",
    "a name changed": "os.rename('log.txt', 'data/log.txt')",
    "a folder's name changed": "os.rename('data', 'm'); Path('m/a.txt').write_text('new')",
    "a replacement": "Path('log.tmp').write_text('n'); os.replace('log.tmp', 'log.txt')",
    "a working directory": "os.chdir('data'); Path('a.txt').write_text('new')",
    "a mode": "os.chmod('log.txt', 0o600)",
    "a size": "os.truncate('log.txt', 1)",
    "a low-level write": "os.close(os.open('log.txt', os.O_WRONLY | os.O_TRUNC))",
    "a link": "os.symlink('a.txt', 'data/l'); Path('data/l').write_text('new')",
    "a hard link": "os.link('log.txt', 'data/hard')",
    "a copied tree": "shutil.copytree('data', 'data2')",
    "a moved tree": "shutil.move('data', 'elsewhere')",
}
ELSEWHERE = {
    "a new file": "(far / 'new.txt').write_text('new')",
    "a file over an old one": "(far / 'x.txt').write_text('new')",
    "a line at the end": "open(far / 'x.txt', 'a').write('more')",
    "folders with files": "os.makedirs(far / 'r/1'); (far / 'r/1/f').write_text('new')",
    "a file gone": "(far / 'x.txt').unlink()",
    "a folder gone": "shutil.rmtree(far)",
    "a name changed": "os.rename(far / 'x.txt', far / 'y.txt')",
    "a folder's name changed": "os.rename(far, other); (other / 'z.txt').write_text('new')",
    "a replacement": "(far / 'n').write_text('n'); os.replace(far / 'n', far / 'x.txt')",
    "a link gone": "(far / 'l').unlink()",
}


def do(code: str, far: Path = HERE) -> None:
    """Run a line of a script."""
    exec(code, {**globals(), "far": far, "other": far.with_name("further")})


@pytest.mark.slow(parts=8)
@pytest.mark.parametrize("what", WRITES)
def test_what_is_written_by_a_relative_path_leaves_no_trace(
    what: str, project: Path, enter: Callable[[], Sandbox]
) -> None:
    before = state(project.parent / "project"), state(project.parent / "far")
    scratch = enter()
    do(WRITES[what])
    scratch.close()
    assert (state(project), state(project.parent / "far")) == before
    clean_up(scratch.folder)
    assert (state(project), state(project.parent / "far")) == before
    assert not scratch.folder.exists()


@pytest.mark.parametrize("what", [name for name in WRITES if "above" not in name])
def test_a_script_finds_what_it_wrote_as_without_the_folder(
    what: str, project: Path, enter: Callable[[], Sandbox], tmp_path: Path
) -> None:
    shutil.copytree(project, tmp_path / "plain", symlinks=True)
    scratch = enter()
    place = Path.cwd()
    do(WRITES[what])
    os.chdir(place)
    seen = {name: file for name, file in _contents(Path.cwd()).items() if "results" not in name}
    scratch.close()
    os.chdir(tmp_path / "plain")
    do(WRITES[what])
    assert seen == _contents(tmp_path / "plain")


def _contents(folder: Path) -> dict[str, bytes | None]:
    """As a program reads it: through all links."""
    found: dict[str, bytes | None] = {}
    for where, folders, files in os.walk(folder, followlinks=True):
        found |= {os.path.relpath(os.path.join(where, name), folder): None for name in folders}
        for name in files:
            path = os.path.join(where, name)
            there = os.path.exists(path)
            found[os.path.relpath(path, folder)] = Path(path).read_bytes() if there else None
    return found


@pytest.mark.parametrize("what", ELSEWHERE)
def test_what_is_written_elsewhere_is_undone(
    what: str,
    project: Path,
    enter: Callable[[], Sandbox],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    far = tmp_path / "far"
    (far / "l").symlink_to("x.txt")
    before = state(far)
    scratch = enter()
    do(ELSEWHERE[what], far)
    scratch.close()
    assert not far.exists() or state(far) != before
    assert clean_up(scratch.folder).restore_errors == ()
    assert state(far) == before
    assert not far.with_name("further").exists()


def test_absolute_paths_into_the_working_directory_are_undone(
    project: Path, enter: Callable[[], Sandbox]
) -> None:
    before = state(project)
    scratch = enter()
    (project / "log.txt").write_text("new")
    (project / "out.txt").write_text("new")
    scratch.close()
    touched = clean_up(scratch.folder)
    assert state(project) == before
    assert touched.restored_count == 2
    assert str(touched) == (
        "would have written 2 files (6 bytes): log.txt, out.txt; 2 elsewhere, undone; "
        "what its Python code wrote was undone"
    )


def test_temporary_folders_and_caches_are_left_alone(
    project: Path,
    enter: Callable[[], Sandbox],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    for name in ("temporary", "hub"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    scratch = enter()
    (tmp_path / "temporary" / "t").write_text("t")
    (tmp_path / "hub" / "h").write_text("h")
    scratch.close()
    assert clean_up(scratch.folder) == WriteReport()
    assert (tmp_path / "temporary" / "t").exists()
    assert (tmp_path / "hub" / "h").exists()


def test_the_files_are_counted_and_named(project: Path, enter: Callable[[], Sandbox]) -> None:
    scratch = enter()
    for number in range(4):
        Path(f"out-{number}.txt").write_text("x" * 1000)
    Path("gone.txt").write_text("x")
    Path("gone.txt").unlink()
    scratch.close()
    assert str(clean_up(scratch.folder)) == (
        "would have written 4 files (4.0 kB): out-0.txt, out-1.txt, out-2.txt, ...; "
        "what its Python code wrote was undone"
    )


def test_the_script_is_a_file_of_its_own_in_the_mirror(
    project: Path, enter: Callable[[], Sandbox], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project / "data")
    scratch = enter()
    assert scratch.prepare_script("../train.py") == "../train.py"
    beside = Path(os.path.abspath("../train.py"))
    assert beside.resolve() == beside
    assert scratch.prepare_script(str(project / "train.py")) == str(beside)
    (beside.resolve().parent / "out.txt").write_text("new")
    error = _raised(str(beside))
    assert error_location(error) == f"{project / 'train.py'}:1"
    scratch.close()
    assert not (project / "out.txt").exists()
    assert Path(os.getcwd()) == project / "data"


def test_places_are_named_from_the_folder_that_the_script_was_started_in(
    project: Path, enter: Callable[[], Sandbox]
) -> None:
    scratch = enter()
    script = os.path.abspath("train.py")
    os.chdir("data")
    assert error_location(_raised(script)) == "train.py:1"
    scratch.close()


def _raised(filename: str) -> BaseException:
    try:
        exec(compile("1 / 0", filename, "exec"))
    except ZeroDivisionError as error:
        return error
    raise AssertionError


def test_odd_names_and_the_results_folder(
    project: Path, enter: Callable[[], Sandbox], tmp_path: Path
) -> None:
    odd = os.fsdecode(b"caf\xe9\n")
    Path(odd).write_text("odd")
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "nfold.db").touch()
    scratch = enter()
    Path(odd).write_text("new")
    assert not os.path.exists("../results")
    scratch.close()
    assert Path(odd).read_text() == "odd"
    assert "1 file" in str(clean_up(scratch.folder))


def test_a_killed_run_is_undone_at_the_next_start(project: Path, tmp_path: Path) -> None:
    measurements = tmp_path / "results" / "measurements"
    code = (
        "import os, signal, sys, tempfile\n"
        "from pathlib import Path\n"
        "from nfold.sandbox import enter_sandbox\n"
        "enter_sandbox(Path(sys.argv[1]))\n"
        "Path(sys.argv[2]).write_text('new')\n"
        "print(flush=True)\n"
        "sys.stdin.read()\n"
    )
    folder = measurements / "m" / "scratch"
    command = [sys.executable, "-c", code, str(folder), str(project / "log.txt")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as rank:
        assert rank.stdout is not None
        rank.stdout.readline()
        assert clean_up_stale(measurements) == []
        assert (project / "log.txt").read_text() == "new"
        journal = str(journal_folder(str(folder)))
        while FileState.of(str(project / "log.txt")) not in read_states(journal)[0]:
            time.sleep(0.01)  # until the run has noted the state of the file
        rank.kill()
    (touched,) = clean_up_stale(measurements)
    assert (touched.restored_count, touched.restore_errors) == (1, ())
    assert (project / "log.txt").read_text() == "old\n"
    assert clean_up_stale(measurements) == []


def test_what_cannot_be_put_back_is_said_and_kept(
    project: Path, enter: Callable[[], Sandbox], tmp_path: Path
) -> None:
    scratch = enter()
    (project / "made").mkdir()
    scratch.close()
    (project / "made" / "by-another").write_text("not the script's")
    (said,) = clean_up(scratch.folder).restore_errors
    assert str(project / "made") in said
    assert (project / "made" / "by-another").exists()


def test_large_old_content_is_refused(
    project: Path, enter: Callable[[], Sandbox], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nfold.sandbox.undo_journal.MAX_BACKUP_BYTES", 3)
    enter()
    with pytest.raises(PermissionError, match="relative path"):
        (project / "log.txt").write_text("new")
    assert (project / "log.txt").read_text() == "old\n"


def test_a_large_file_is_not_copied_and_a_pipe_is_left_alone(
    project: Path, enter: Callable[[], Sandbox], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nfold.sandbox.mirror.MAX_COPIED_BYTES", 3)
    os.mkfifo(project / "pipe")
    enter()
    with pytest.raises(PermissionError, match="next: open it for reading"):
        Path("log.txt").open("a").close()
    Path("log.txt").write_text("new")
    os.close(os.open("pipe", os.O_RDWR | os.O_NONBLOCK))
    assert (project / "log.txt").read_text() == "old\n"


def test_a_large_folder_above_shows_only_the_way_down(
    project: Path, enter: Callable[[], Sandbox], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nfold.sandbox.mirror.MAX_LINKED_ENTRIES", 1)
    enter()
    assert os.listdir("..") == ["project"]
    assert Path("data/a.txt").read_text() == "a"


def test_what_writes_in_c_is_announced_too(
    project: Path,
    enter: Callable[[], Sandbox],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "h5py.py").write_text(
        "import os\n"
        "class File:\n"
        "    def __init__(self, name, mode='r'):\n"
        "        self.link = os.path.islink(name)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    monkeypatch.delitem(sys.modules, "h5py", raising=False)
    enter()
    h5py = __import__("h5py")
    monkeypatch.setitem(sys.modules, "h5py", h5py)
    assert h5py.File("log.txt").link
    assert not h5py.File("log.txt", "a").link
    assert Path("log.txt").read_text() == "old\n"
    assert not h5py.File("log.txt", mode="w").link
    assert not h5py.File(name="data/a.txt", mode="w").link
    assert Path("data/a.txt").read_text() == ""


def test_torch_saves_into_the_folder(project: Path, enter: Callable[[], Sandbox]) -> None:
    import torch

    before = state(project)
    scratch = enter()
    torch.save({"x": torch.zeros(3)}, "log.txt")
    assert torch.load("log.txt")["x"].shape == (3,)
    torch.save(torch.zeros(3), f="data/a.txt")
    scratch.close()
    assert state(project) == before
    assert [Path(name).name for name, _ in clean_up(scratch.folder).files] == ["log.txt", "a.txt"]
