"""Files outside the sandbox are restored: with two runs at once, after kills and power loss."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nfold.core.errors import MachineUnfit
from nfold.core.process_identity import SESSION_VARIABLE, ProcessIdentity
from nfold.core.source_location import SANDBOX_ROOTS
from nfold.sandbox import clean_up, clean_up_stale, enter_sandbox, needs_restore, restore_command
from nfold.sandbox.audit_events import AUDIT_HOOK
from nfold.sandbox.change_watcher import FileState, read_states
from nfold.sandbox.file_claims import FileClaims, journal_folder
from nfold.sandbox.undo_journal import UndoJournal

KILLS = 100
LIMIT_S = 60.0
RANK = """
import os, sys
from pathlib import Path
from nfold.sandbox import enter_sandbox
enter_sandbox(Path(sys.argv[1]))
try:
    Path(sys.argv[2]).write_text("changed by " + sys.argv[3])
except Exception as error:
    print(f"{type(error).__name__}: {error}", flush=True)
else:
    print("written", flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with files, the working directory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "project"
    (folder / "old").mkdir(parents=True)
    for number in range(3):
        (folder / f"log-{number}.txt").write_text(f"old {number}\n")
    (folder / "old" / "model.bin").write_bytes(bytes(1000))
    monkeypatch.chdir(folder)
    yield folder
    AUDIT_HOOK.set_listener(None)
    SANDBOX_ROOTS.clear()


def contents(folder: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


def sandbox_folder(tmp_path: Path, run: str) -> Path:
    return tmp_path / f"results-{run}" / "measurements" / "m" / "scratch"


class Rank:
    """A process in a sandbox of its own that writes to a file and waits."""

    def __init__(self, tmp_path: Path, run: str, file: Path, **environment: str) -> None:
        self.folder = sandbox_folder(tmp_path, run)
        self._file = str(file)
        self.process = subprocess.Popen(
            [sys.executable, "-c", RANK, str(self.folder), str(file), run],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )
        assert self.process.stdout is not None
        self.answer = self.process.stdout.readline().strip()

    def wait_until_noted(self) -> None:
        """Until the run has noted the state in which it left the file."""
        journal, end = str(journal_folder(str(self.folder))), time.monotonic() + LIMIT_S
        while FileState.of(self._file) not in read_states(journal)[0]:
            assert time.monotonic() < end
            time.sleep(0.01)

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


def test_of_two_runs_at_once_the_second_is_refused(project: Path, tmp_path: Path) -> None:
    before, file = contents(project), project / "log-0.txt"
    first, second = (Rank(tmp_path, run, file) for run in ("first", "second"))
    assert first.answer == "written"
    assert second.answer.startswith(f"MachineUnfit: {file} is in use by another nfold run")
    assert f"process {first.process.pid}: " in second.answer
    for rank in (first, second):
        rank.end()
    refused, restored = clean_up(second.folder), clean_up(first.folder)
    assert refused.refusal is not None
    assert str(file) in refused.refusal
    assert (restored.refusal, restored.restored_count, restored.restore_errors) == (None, 1, ())
    assert contents(project) == before


def test_a_session_keeps_its_files_between_its_runs(project: Path, tmp_path: Path) -> None:
    file = project / "log-0.txt"
    with subprocess.Popen(["sleep", "600"]) as session:
        own = {SESSION_VARIABLE: _session_of(session.pid)}
        first = Rank(tmp_path, "first", file, **own)
        first.end()
        clean_up(first.folder)
        assert not first.folder.exists()
        other, again = Rank(tmp_path, "other", file), Rank(tmp_path, "again", file, **own)
        assert other.answer.startswith("MachineUnfit: ")
        assert again.answer == "written"
        for rank in (other, again):
            rank.end()
            clean_up(rank.folder)
        session.kill()
    later = Rank(tmp_path, "later", file)
    assert later.answer == "written"
    later.end()
    clean_up(later.folder)
    assert file.read_text() == "old 0\n"


def _session_of(pid: int) -> str:
    found = ProcessIdentity.of(pid)
    assert found is not None
    return found.session_marker


def test_content_of_a_killed_run_is_no_original(project: Path, tmp_path: Path) -> None:
    """Neither for a run with other results; the message names the backup and the command."""
    file = project / "log-0.txt"
    killed = Rank(tmp_path, "killed", file)
    killed.wait_until_noted()
    killed.end()
    refused = Rank(tmp_path, "later", file)
    refused.end()
    assert file.read_text() == "changed by killed"
    assert str(journal_folder(str(killed.folder))) in refused.answer
    assert f"nfold explain SCRIPT --results {tmp_path / 'results-killed'}" in refused.answer
    assert len(clean_up_stale(tmp_path / "results-killed" / "measurements")) == 1
    assert file.read_text() == "old 0\n"
    last = Rank(tmp_path, "last", file)
    assert last.answer == "written"
    last.end()


def test_independent_ranks_restore_what_was_there_before_both(
    project: Path, tmp_path: Path
) -> None:
    before, folder = contents(project), sandbox_folder(tmp_path, "replicas")
    for name in ("-0", "-1"):
        sandbox = enter_sandbox(folder, name)
        Path("relative.txt").write_text(name)
        (project / "log-0.txt").write_text(name)
        (project / "new").mkdir(exist_ok=True)
        (project / "new" / f"file{name}").write_text(name)
        sandbox.close()
    report = clean_up(folder)
    assert report.restore_errors == ()
    assert contents(project) == before
    assert not folder.exists()


def test_a_folder_that_was_renamed_is_claimed_as_a_whole(project: Path, tmp_path: Path) -> None:
    before = contents(project)
    sandbox = enter_sandbox(sandbox_folder(tmp_path, "renames"))
    os.rename(project / "old", project / "new")
    other = FileClaims("/another/run")
    other.session = type(other.session)(1, 1)
    with pytest.raises(MachineUnfit, match="is in use by another nfold run"):
        other.claim(str(project / "old" / "model.bin"))
    sandbox.close()
    clean_up(sandbox.folder)
    assert contents(project) == before


def test_a_file_that_another_run_holds_is_not_restored_over(project: Path, tmp_path: Path) -> None:
    file = project / "log-0.txt"
    first = Rank(tmp_path, "first", file)
    first.end()
    for record in (tmp_path / "cache").rglob("*.json"):
        record.unlink()  # as if the user had emptied the cache
    second = Rank(tmp_path, "second", file)
    (error,) = clean_up(first.folder).restore_errors
    assert file.read_text() == "changed by second"
    assert f"process {second.process.pid}" in error
    assert str(journal_folder(str(first.folder))) in error
    second.end()
    clean_up(second.folder)
    clean_up(first.folder)
    assert file.read_text() == "old 0\n"


def script(project: Path) -> None:
    """What the killed processes do, again and again."""
    for number in range(3):
        (project / f"log-{number}.txt").write_text("new")
    (project / "made" / "deep").mkdir(parents=True)
    (project / "made" / "deep" / "file").write_text("new")
    os.replace(project / "made" / "deep" / "file", project / "log-1.txt")
    os.rename(project / "old", project / "moved")
    (project / "moved" / "model.bin").write_text("new")
    (project / "moved" / "other.bin").write_text("new")


def _run_child(action: Callable[[], None], kill_after_s: float | None = None) -> float:
    start, child = time.perf_counter(), os.fork()
    if child == 0:
        try:
            action()
        finally:
            os._exit(0)
    if kill_after_s is not None:
        time.sleep(kill_after_s)
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return time.perf_counter() - start


@pytest.mark.slow
def test_kills_at_random_moments(project: Path, tmp_path: Path) -> None:
    """Of the script and of the process that restores: in the end everything is as before."""
    before, moments = contents(project), random.Random(0)
    unsettled, run_s, restore_s = 0, 0.0, 0.0
    for number in range(KILLS + 1):
        folder = sandbox_folder(tmp_path, str(number))

        def run(folder: Path = folder) -> None:
            enter_sandbox(folder)
            script(project)

        def restore(folder: Path = folder) -> None:
            clean_up(folder)

        if number == 0:
            run_s, restore_s = _run_child(run), _run_child(restore)
        else:
            _run_child(run, run_s * moments.random())
            unsettled += needs_restore(folder)
            _run_child(restore, restore_s * moments.random())
        assert clean_up(folder).restore_errors == (), number
        assert contents(project) == before, number
        assert not folder.exists()
    assert unsettled


@pytest.mark.slow(parts=8)
def test_every_prefix_of_a_journal(project: Path, tmp_path: Path) -> None:
    """Complete entries are restored; a torn one is named with its backup."""
    before, folder = contents(project), sandbox_folder(tmp_path, "torn")
    sandbox = enter_sandbox(folder)
    (project / "log-0.txt").write_text("new")
    (project / "log-1.txt").write_text("new")
    sandbox.close()
    entries = journal_folder(str(folder)) / "entries"
    whole = entries.read_bytes()
    first = whole.index(b"\n") + 1
    claims = tmp_path / "cache"
    shutil.copytree(claims, tmp_path / "claims")
    for length in range(len(whole) + 1):
        shutil.rmtree(claims)
        shutil.copytree(tmp_path / "claims", claims)
        entries.write_bytes(whole[:length])
        (entries.parent / "restored").unlink(missing_ok=True)
        for number, end in enumerate((first, len(whole))):
            # The script changes nothing before its entry is complete, with or without its newline.
            (project / f"log-{number}.txt").write_text(
                "new" if length >= end - 1 else f"old {number}\n"
            )
        errors = [*UndoJournal(str(folder)).undo(witnessed=True).values()]
        assert contents(project) == before, length
        torn = length not in (0, first - 1, first, len(whole) - 1, len(whole))
        assert bool(errors) == torn, (length, errors)
        if torn:
            number = 0 if length < first else 1
            assert str(project / f"log-{number}.txt") in " ".join(errors)
            assert str(entries.parent / f"before-{number}") in errors[0]


def test_a_torn_entry_and_what_another_process_appended(project: Path, tmp_path: Path) -> None:
    sandbox = enter_sandbox(sandbox_folder(tmp_path, "glued"))
    (project / "log-0.txt").write_text("new")
    entries = journal_folder(str(sandbox.folder)) / "entries"
    with AUDIT_HOOK.mute(), entries.open("a") as file:
        file.write('{"path": "/torn/by/a/kill", "wa')
    (project / "log-1.txt").write_text("new")
    sandbox.close()
    report = clean_up(sandbox.folder)
    assert [error.partition(":")[0] for error in report.restore_errors] == ["/torn/by/a/kill"]
    assert (project / "log-0.txt").read_text() == "old 0\n"
    assert (project / "log-1.txt").read_text() == "old 1\n"
    later = Rank(
        tmp_path, "later", project / "log-0.txt", **{SESSION_VARIABLE: _session_of(os.getpid())}
    )
    assert later.answer == "written"
    later.end()


def test_a_torn_note_of_what_was_restored_is_no_error(project: Path, tmp_path: Path) -> None:
    sandbox = enter_sandbox(sandbox_folder(tmp_path, "notes"))
    (project / "log-0.txt").write_text("new")
    sandbox.close()
    (journal_folder(str(sandbox.folder)) / "restored").write_text("[0, [7")
    assert clean_up(sandbox.folder).restore_errors == ()
    assert (project / "log-0.txt").read_text() == "old 0\n"


def test_a_torn_list_of_writes_is_no_error(project: Path, tmp_path: Path) -> None:
    sandbox = enter_sandbox(sandbox_folder(tmp_path, "list"))
    (project / "log-0.txt").write_text("new")
    sandbox.close()
    with (sandbox.folder / "touched").open("a") as file:
        file.write('["/torn')
    assert [Path(name).name for name, _ in clean_up(sandbox.folder).files] == ["log-0.txt"]
    assert (project / "log-0.txt").read_text() == "old 0\n"


def test_the_backup_is_on_the_disk_before_its_entry(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def note(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    sandbox = enter_sandbox(sandbox_folder(tmp_path, "sync"))
    (project / "log-0.txt").write_text("new")
    sandbox.close()
    journal = journal_folder(str(sandbox.folder))
    (entry,) = map(json.loads, (journal / "entries").read_text().splitlines())
    order = [synced.index(str(file)) for file in (journal / entry["backup"], journal / "entries")]
    assert order == sorted(order)


def test_the_restore_command_names_the_results_folder(tmp_path: Path) -> None:
    folder = sandbox_folder(tmp_path, "a")
    assert restore_command(str(folder)).endswith(f"--results {tmp_path / 'results-a'}")
