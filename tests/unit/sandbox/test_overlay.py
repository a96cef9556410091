"""In a view of the file system nothing that a script or a program of it writes changes a file."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from nfold.core.errors import MachineUnfit
from nfold.sandbox import (
    WriteReport,
    clean_up,
    clean_up_stale,
    enter_view,
    guard_view,
    unprotected_reason,
)
from nfold.sandbox.file_lock import lock_file
from nfold.sandbox.overlay import JOURNAL_ONLY, MODE_VARIABLE, UPPER, _View, unshare_mounts
from nfold.sandbox.sandbox import CLEANUP_LOCK

KILLS = 100
ROWS = "select count(*) from rows"


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with files, a database and a repository, the working directory."""
    monkeypatch.delenv(MODE_VARIABLE, raising=False)
    reason = unprotected_reason(tmp_path)
    if reason is not None:
        pytest.skip(f"no view of the file system on this machine: {reason}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "project"
    (folder / "data").mkdir(parents=True)
    (tmp_path / "cache").mkdir()
    for name in ("log.txt", "data/a.txt"):
        (folder / name).write_text("old\n")
    with sqlite3.connect(folder / "runs.db") as database:
        database.execute("pragma journal_mode=wal")
        database.execute("create table rows (value)")
        database.execute("insert into rows values (1)")
    database.close()
    monkeypatch.chdir(folder)
    subprocess.run("git init -q . && git add log.txt", shell=True, check=True)
    return folder


def state(folder: Path) -> dict[str, object]:
    return {
        str(path.relative_to(folder)): (
            path.lstat().st_mode,
            path.lstat().st_mtime_ns if path.is_file() else None,
            path.read_bytes() if path.is_file() else None,
        )
        for path in sorted(folder.rglob("*"))
        if path.name != "runs.db-shm"
    }


def append(name: str) -> None:
    with open(name, "a") as file:
        file.write("more")


def commit(name: str) -> None:
    uri = name.startswith("file:")
    database = sqlite3.connect(name, uri=uri)
    for _ in range(50):
        database.execute("insert into rows values (2)")
        database.commit()


def worker(name: str) -> None:
    Path(name).write_text("new")


def forkserver(name: str) -> None:
    process = multiprocessing.get_context("forkserver").Process(target=worker, args=(name,))
    process.start()
    process.join()
    assert process.exitcode == 0


def replace_self(name: str) -> None:
    os.execv(sys.executable, [sys.executable, "-c", f"open({name!r}, 'w').write('new')"])


def hard_link(name: str) -> None:
    os.link(name, "other-name")
    Path("other-name").write_text("new")


def relative_to_folder(name: str) -> None:
    folder = os.open(os.path.dirname(name), os.O_RDONLY)
    os.unlink(os.path.basename(name), dir_fd=folder)


def save_by_torch(name: str) -> None:
    import torch

    torch.save(torch.zeros(3), name)


WRITES: dict[str, Callable[[str], object]] = {
    "python": lambda name: Path(name).write_text("new"),
    "append": append,
    "cp": lambda name: subprocess.run(["cp", "/etc/passwd", name], check=True),
    "rm": lambda name: os.system(f"rm -r {os.path.dirname(name)}/*"),
    "git": lambda name: subprocess.run(
        "git -c user.name=a -c user.email=b commit -qm c", shell=True, check=True
    ),
    "C": save_by_torch,
    "exec": replace_self,
    "forkserver": forkserver,
    "hard link": hard_link,
    "folder descriptor": relative_to_folder,
    "mode": lambda name: os.chmod(name, 0o600),
    "time": lambda name: os.utime(name, (1, 1)),
    "rename": lambda name: os.rename(name, f"{name}.old"),
    "sqlite": lambda name: commit(str(Path(name).with_name("runs.db"))),
    "sqlite uri": lambda name: commit(f"file:{Path(name).with_name('runs.db')}?mode=rw"),
}


def run_in_view(
    folder: Path, action: Callable[[], object], kill_after_s: float | None = None
) -> tuple[int, float]:
    """Run an action in a child that has entered a view; return its exit code and seconds."""
    start, child = time.perf_counter(), os.fork()
    if child == 0:
        code = 1
        try:
            os.setsid()
            enter_view(folder)
            action()
            code = 0
        finally:
            os._exit(code)
    if kill_after_s is not None:
        time.sleep(kill_after_s)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), time.perf_counter() - start


@pytest.mark.slow(parts=8)
@pytest.mark.parametrize("user_namespace", [False, True], ids=["root", "user"])
@pytest.mark.parametrize("name", WRITES)
def test_no_write_is_kept(
    name: str,
    user_namespace: bool,
    project: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if user_namespace:
        monkeypatch.setattr("nfold.sandbox.overlay._may_mount", lambda: False)
    before, folder = state(project), tmp_path / "results" / "m" / "scratch"
    code, _ = run_in_view(folder, lambda: WRITES[name](str(project / "log.txt")))
    assert code == 0
    report = clean_up(folder)
    assert state(project) == before
    assert (report.is_protected, report.restore_errors) == (True, ())
    assert bool(report.files) == (name not in ("rm", "folder descriptor"))
    assert not folder.exists()
    with sqlite3.connect(project / "runs.db") as database:
        assert database.execute(ROWS).fetchone() == (1,)
        assert database.execute("pragma integrity_check").fetchone() == ("ok",)


def test_a_script_finds_what_it_wrote_under_the_same_path(project: Path, tmp_path: Path) -> None:
    def script() -> None:
        (project / "new.txt").write_text("new")
        assert os.getcwd() == str(project)
        assert Path("new.txt").read_text() == "new"
        assert subprocess.check_output(["cat", str(project / "new.txt")]) == b"new"

    assert run_in_view(tmp_path / "results" / "m" / "scratch", script)[0] == 0


def test_results_and_caches_are_real(project: Path, tmp_path: Path) -> None:
    folder = tmp_path / "results" / "m" / "scratch"

    def script() -> None:
        (folder.parent / "samples.json").write_text("{}")
        (tmp_path / "cache" / "weights").write_text("new")

    assert run_in_view(folder, script)[0] == 0
    assert (folder.parent / "samples.json").exists()
    assert (tmp_path / "cache" / "weights").exists()
    assert clean_up(folder).files == ()


def test_a_project_below_a_cache_folder_is_protected(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = state(project)
    folder = tmp_path / "results" / "m" / "scratch"
    assert run_in_view(folder, lambda: Path("log.txt").write_text("new"))[0] == 0
    assert state(project) == before


def test_what_was_written_is_named_with_its_size(project: Path, tmp_path: Path) -> None:
    folder = tmp_path / "results" / "m" / "scratch"
    run_in_view(folder, lambda: (project / "data" / "out.bin").write_bytes(bytes(2000)))
    assert str(clean_up(folder)) == (
        "would have written 1 file (2.0 kB): data/out.bin; none was kept"
    )


def test_a_view_in_use_is_not_cleaned_up(project: Path, tmp_path: Path) -> None:
    measurements = tmp_path / "results" / "measurements"
    folder, (reading, writing) = measurements / "m" / "scratch", os.pipe()

    def script() -> None:
        os.write(writing, b"x")
        time.sleep(600)

    child = os.fork()
    if child == 0:
        enter_view(folder)
        script()
    os.read(reading, 1)
    assert clean_up_stale(measurements) == []
    assert list(folder.glob(f"{UPPER}*"))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert len(clean_up_stale(measurements)) == 1
    assert not folder.exists()


def test_a_folder_with_an_unusual_name_that_contains_a_mount_is_shown(
    project: Path, tmp_path: Path
) -> None:
    """In /proc/self/mountinfo a blank is written in octal, and other letters as they are."""
    mounted = tmp_path / "m\u00e4rz 1" / "data"
    mounted.mkdir(parents=True)

    def script() -> None:
        assert (mounted / "a.txt").read_text() == "mounted"
        (mounted / "a.txt").write_text("new")

    child = os.fork()
    if child == 0:
        code = 1
        try:
            unshare_mounts()
            subprocess.run(["mount", "-t", "tmpfs", "tmpfs", mounted], check=True)
            (mounted / "a.txt").write_text("mounted")
            code, _ = run_in_view(tmp_path / "results" / "m" / "scratch", script)
            assert (mounted / "a.txt").read_text() == "mounted"
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_an_entry_that_is_deleted_while_the_view_is_built_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Beside a mount point, as often below /tmp."""
    shown, gone = tmp_path / "shown", tmp_path / "shown" / "gone"
    shown.mkdir()
    gone.mkdir() if kind == "folder" else gone.touch()
    (entry,) = os.scandir(shown)
    gone.rmdir() if kind == "folder" else gone.unlink()
    monkeypatch.setattr("nfold.sandbox.overlay._mount", lambda source, *_, **__: os.stat(source))
    view = _View(tmp_path / "results", "view")
    monkeypatch.setattr(view, "_mounts", {str(shown / "mounted"): "tmpfs"})
    (tmp_path / "tmpfs").touch()  # the source of that kind of mount
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr("nfold.sandbox.overlay.os.scandir", lambda _: [entry])
        view.show(str(shown))
    assert not list((tmp_path / "results").glob("upper*/*/path"))


def test_two_processes_clean_up_one_after_the_other(project: Path, tmp_path: Path) -> None:
    folder = tmp_path / "results" / "m" / "scratch"
    run_in_view(folder, lambda: Path("log.txt").write_text("new"))
    other = lock_file(folder / CLEANUP_LOCK)
    reports: list[WriteReport] = []
    second = threading.Thread(target=lambda: reports.append(clean_up(folder)))
    second.start()
    second.join(0.2)
    assert (second.is_alive(), reports) == (True, [])
    other.close()
    second.join()
    assert [len(report.files) for report in reports] == [1]
    assert clean_up(folder).files == ()


def test_a_change_of_a_large_file_is_refused(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nfold.sandbox.sandbox.MAX_COPIED_BYTES", 3)
    monkeypatch.setattr("nfold.sandbox.mirror.MAX_COPIED_BYTES", 3)

    def script() -> None:
        guard_view(tmp_path)
        Path("log.txt").write_text("emptied first")
        with pytest.raises(PermissionError, match="nfold copies at most"):
            append("data/a.txt")

    os.utime("log.txt", (1, 1))
    os.utime("data/a.txt", (1, 1))
    assert run_in_view(tmp_path / "results" / "m" / "scratch", script)[0] == 0


def test_a_rank_that_replaces_itself_is_refused(project: Path, tmp_path: Path) -> None:
    folder = tmp_path / "results" / "m" / "scratch"

    def script() -> None:
        guard_view(folder)
        with contextlib.suppress(MachineUnfit):
            os.execv("/bin/true", ["true"])

    assert run_in_view(folder, script)[0] == 0
    assert "/bin/true (os.exec)" in str(clean_up(folder).refusal)


def test_a_machine_without_views_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "mount overlay: Operation not permitted")

    monkeypatch.setattr("nfold.sandbox.overlay._mount", refuse)
    monkeypatch.setattr("nfold.sandbox.overlay._call", lambda *_: None)
    with pytest.raises(MachineUnfit, match=f"{MODE_VARIABLE}={JOURNAL_ONLY}"):
        enter_view(tmp_path / "results" / "m" / "scratch")


@pytest.mark.slow
def test_kills_at_random_moments(project: Path, tmp_path: Path) -> None:
    before, moments = state(project), random.Random(0)

    def script() -> None:
        subprocess.run("cp /etc/passwd log.txt; echo more >> data/a.txt", shell=True, check=True)
        commit(str(project / "runs.db"))
        shutil.rmtree(project / "data")

    _, whole_s = run_in_view(tmp_path / "results" / "first" / "scratch", script)
    for number in range(KILLS):
        folder = tmp_path / "results" / str(number) / "scratch"
        run_in_view(folder, script, kill_after_s=whole_s * moments.random())
        assert state(project) == before, number
        clean_up(folder)
        assert state(project) == before, number
