"""No byte of a user is lost: other writers, databases, new interpreters, hostile results folders."""

from __future__ import annotations

import os
import random
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nfold.sandbox import WriteReport, clean_up, clean_up_stale
from nfold.sandbox.change_watcher import FileState, read_states
from nfold.sandbox.file_claims import journal_folder

PRELUDE = """
import os, sys, time
from pathlib import Path
from nfold.sandbox import enter_sandbox
enter_sandbox(Path(sys.argv[1]))
FAR = Path(sys.argv[2])
FILE = FAR / "log.txt"
"""
EPILOGUE = "\nprint('done', flush=True)\nsys.stdin.read()\n"
LIMIT_S = 60.0
OLD = "old\n"


@pytest.fixture
def far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a log file, outside of the working directory and of the temporary folder.

    The temporary folder has a short name: a forkserver has a socket there (unix(7): 108 bytes).
    """
    for name in ("project", "far"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path / "project")
    (tmp_path / "far" / "log.txt").write_text(OLD)
    with tempfile.TemporaryDirectory() as temporary:
        monkeypatch.setenv("TMPDIR", temporary)
        monkeypatch.setattr("tempfile.tempdir", temporary)
        yield tmp_path / "far"


class Script:
    """A process in a sandbox that runs ``code`` and waits."""

    def __init__(self, far: Path, code: str, run: str = "run") -> None:
        self.far = far
        self.measurements = far.parent / f"results-{run}" / "measurements"
        self.folder = self.measurements / "m" / "scratch"
        command = [sys.executable, "-c", PRELUDE + code + EPILOGUE, str(self.folder), str(far)]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait(self) -> None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line == "done\n", self.process.communicate()[1]

    def has_noted(self, name: str) -> bool:
        """Whether the run has noted the present state of a file."""
        states, _ = read_states(str(journal_folder(str(self.folder))))
        return FileState.of(str(self.far / name)) in states

    def finish(self) -> WriteReport:
        """Let it end, then clean up."""
        self.wait()
        _, errors = self.process.communicate("")
        assert self.process.returncode == 0, errors
        return clean_up(self.folder)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def clean_up_later(self) -> WriteReport:
        (report,) = clean_up_stale(self.measurements)
        return report


def copies(far: Path, report: WriteReport) -> list[bytes]:
    """The contents of all files of the user's cache folder that the report names."""
    said = " ".join(report.restore_errors)
    files = (far.parent / "cache").rglob("*")
    return [file.read_bytes() for file in files if str(file) in said and file.is_file()]


def run_script(far: Path, code: str) -> WriteReport:
    return Script(far, code).finish()


def measure_s(far: Path, code: str) -> float:
    """Return the seconds of a script and of its clean-up."""
    start = time.monotonic()
    Script(far, code, "measured").finish()
    return time.monotonic() - start


def wait_until(condition: object) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("real", ["real\n", "old\nreal\n"])
@pytest.mark.parametrize("name", ["log.txt", "new.txt"])
def test_what_a_real_run_wrote_after_a_kill_stays(far: Path, name: str, real: str) -> None:
    script = Script(far, f"(FAR / {name!r}).write_text('of the script')")
    script.wait()
    script.kill()
    (far / name).write_text(real)
    report = script.clean_up_later()
    assert (far / name).read_text() == real
    (said,) = report.restore_errors
    assert str(far / name) in said
    assert copies(far, report) == ([OLD.encode()] if name == "log.txt" else [])
    assert clean_up_stale(script.measurements) == []
    assert copies(far, report) == ([OLD.encode()] if name == "log.txt" else [])
    later = Script(far, f"(FAR / {name!r}).write_text('of a later script')", "later")
    assert later.finish().restore_errors == ()
    assert (far / name).read_text() == real


def test_what_a_killed_run_left_is_undone(far: Path) -> None:
    """It is known to be the script's as soon as the run has noted the state of the file."""
    script = Script(far, "FILE.write_text('new'); (FAR / 'more').write_text('new')")
    script.wait()
    wait_until(lambda: script.has_noted("log.txt") and script.has_noted("more"))
    script.kill()
    assert script.clean_up_later().restore_errors == ()
    assert [(f.name, f.read_text()) for f in far.iterdir()] == [("log.txt", OLD)]


WRITERS = {
    "held, appends": "f = open(FILE, 'a', buffering=1)\nwrite = f.write",
    "appends": "def write(line):\n with open(FILE, 'a') as f: f.write(line)",
    "truncates, then appends": "FILE.write_text('')\nf = open(FILE, 'a', buffering=1)\nwrite = f.write",
}


@pytest.mark.slow(parts=8)
@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("how", WRITERS)
def test_what_another_job_appends_meanwhile_stays(far: Path, how: str, held: bool) -> None:
    code = WRITERS[how] + "\nwrite('first\\n'); print('ready', flush=True)\n"
    code += "while not (FAR / 'stop').exists(): write('step\\n'); time.sleep(0.02)"
    script = Script(far, code)
    assert script.process.stdout is not None
    assert script.process.stdout.readline() == "ready\n"
    lines = [f"job {number}\n" for number in range(28)]
    job = (far / "log.txt").open("a")
    for line in lines:
        if not held:
            job.close()
            job = (far / "log.txt").open("a")
        job.write(line)
        job.flush()
        time.sleep(0.02)
    (far / "stop").touch()
    report = script.finish()
    job.close()
    now = (far / "log.txt").read_text()
    assert [line for line in lines if line not in now] == []
    (said,) = report.restore_errors
    assert str(far / "log.txt") in said
    assert "another process" in said
    assert OLD.encode() in copies(far, report)


def test_what_another_job_appended_is_copied_before_the_script_truncates(far: Path) -> None:
    script = Script(
        far,
        "FILE.write_text('new')\nprint('ready', flush=True)\nsys.stdin.readline()\n"
        "FILE.write_text('again')",
    )
    assert script.process.stdout is not None
    assert script.process.stdin is not None
    assert script.process.stdout.readline() == "ready\n"
    with (far / "log.txt").open("a") as job:
        job.write("of a job\n")
    cache = far.parent / "cache"
    wait_until(lambda: any("null" in f.read_text() for f in cache.rglob("states-*")))
    script.process.stdin.write("\n")
    script.process.stdin.flush()
    report = script.finish()
    assert any(b"of a job" in content for content in copies(far, report))


HARMLESS = {
    "append again and again": "for _ in range(30): FILE.open('a').write('x')",
    "two handles": "a, b = FILE.open('a'), FILE.open('a'); a.write('x'); b.write('y')",
    "a replacement": "(FAR / 'n').write_text('n'); os.replace(FAR / 'n', FILE)",
    "output goes there": (
        "f = os.open(FILE, os.O_WRONLY | os.O_APPEND); out = os.dup(1); os.dup2(f, 1)\n"
        "print('x', flush=True); os.dup2(out, 1)"
    ),
    "a forked process": (
        "pid = os.fork()\nif not pid:\n FILE.open('a').write('x'); os._exit(0)\n"
        "FILE.open('a').write('y'); os.waitpid(pid, 0)"
    ),
    "tensors": "import torch; [torch.save(torch.zeros(9), str(FILE)) for _ in range(3)]",
    "HDF5": (
        "import h5py\nfor m in 'waa':\n with h5py.File(FAR / 'h', m) as f: f[str(len(f))] = 1"
    ),
    "a database": (
        "import sqlite3\nfor _ in range(3):\n c = sqlite3.connect(FAR / 'db')\n"
        " c.execute('create table if not exists t (x)'); c.execute('insert into t values (1)')\n"
        " c.commit(); c.close()"
    ),
    "a mode": "FILE.chmod(0o600); FILE.write_text('new')",
    "a temporary folder": (
        "import tempfile, subprocess\nwith tempfile.TemporaryDirectory() as d:\n"
        " subprocess.run(['touch', d + '/f'])"
    ),
}


@pytest.mark.slow(parts=8)
@pytest.mark.parametrize("what", HARMLESS)
def test_a_script_alone_is_undone_without_a_word(far: Path, what: str) -> None:
    before = os.stat(far / "log.txt")
    assert run_script(far, HARMLESS[what]).restore_errors == ()
    assert [(f.name, f.read_text()) for f in far.iterdir()] == [("log.txt", OLD)]
    after = os.stat(far / "log.txt")
    assert (after.st_mode, after.st_mtime_ns) == (before.st_mode, before.st_mtime_ns)


def database(far: Path, *, wal: bool = True) -> sqlite3.Connection:
    made = sqlite3.connect(far / "db")
    if wal:
        made.execute("pragma journal_mode=wal")
        made.execute("pragma wal_autocheckpoint=0")
    made.execute("create table t (x)")
    made.executemany("insert into t values (?)", [(n,) for n in range(500)])
    made.commit()
    return made


@pytest.mark.parametrize("end", ["finish", "kill"])
@pytest.mark.parametrize("open_", ["FAR / 'db'", "f'file:{FAR}/db?mode=rwc', uri=True"])
def test_a_database_is_restored_as_a_whole(far: Path, open_: str, end: str) -> None:
    made = database(far)
    for suffix in ("", "-wal"):  # as a killed process leaves it: with rows in the log only
        (far / f"copy{suffix}").write_bytes((far / f"db{suffix}").read_bytes())
    made.close()
    for suffix in ("", "-wal"):
        (far / f"copy{suffix}").replace(far / f"db{suffix}")
    script = Script(
        far,
        f"import sqlite3\nc = sqlite3.connect({open_})\nc.execute('delete from t where x > 9')\n"
        "c.commit(); c.execute('pragma wal_checkpoint'); c.execute('insert into t values (-1)')\n"
        "c.commit()\n",
    )
    script.wait()
    if end == "kill":
        script.kill()
    else:
        script.process.communicate("")
    assert clean_up(script.folder).restore_errors == ()
    found = sqlite3.connect(far / "db")
    assert found.execute("pragma integrity_check").fetchall() == [("ok",)]
    assert [x for (x,) in found.execute("select x from t order by x")] == list(range(500))
    found.close()


def test_a_database_of_the_working_directory_keeps_its_log(far: Path) -> None:
    project = far.parent / "project"
    made = database(project)
    log = (project / "db-wal").read_bytes()
    run_script(
        far,
        "import sqlite3\nc = sqlite3.connect('db')\nc.execute('delete from t'); c.commit()\n"
        "assert c.execute('select count(*) from t').fetchone() == (0,)\n",
    )
    assert (project / "db-wal").read_bytes() == log
    assert made.execute("select count(*) from t").fetchone() == (500,)
    made.close()


def test_a_script_that_replaces_its_process_is_refused(far: Path) -> None:
    script = Script(far, "os.execv(sys.executable, [sys.executable, '-c', 'print()'])")
    _, errors = script.process.communicate("")
    assert "MachineUnfit" in errors
    refusal = clean_up(script.folder).refusal
    assert refusal is not None
    assert "os.exec" in refusal


CHILD = "from pathlib import Path; Path({!r}).write_text('new'); Path('rel.txt').write_text('new')"
CHILDREN = {
    "a subprocess": "subprocess.run([sys.executable, '-c', CODE], check=True)",
    "a subprocess with its own environment": (
        "subprocess.run([sys.executable, '-c', CODE], check=True, env={'PATH': '/bin'})"
    ),
    "a shell": "assert os.system(f'{sys.executable} -c \"$CODE\"') == 0",
    "spawn": "run('spawn')",
    "forkserver": "run('forkserver')",
}


@pytest.mark.parametrize("what", CHILDREN)
def test_new_interpreters_enter_the_sandbox(far: Path, what: str) -> None:
    code = (
        f"import subprocess, multiprocessing\nCODE = {CHILD.format(str(far / 'log.txt'))!r}\n"
        "os.environ['CODE'] = CODE\n"
        "def run(method):\n p = multiprocessing.get_context(method).Process(target=exec, args=(CODE,))"
        "\n p.start(); p.join(); assert p.exitcode == 0\n"
        f"{CHILDREN[what]}\nassert FILE.read_text() == 'new'\nassert Path('rel.txt').exists()"
    )
    assert run_script(far, code).restore_errors == ()
    assert (far / "log.txt").read_text() == OLD
    assert list((far.parent / "project").iterdir()) == []


def test_the_sitecustomize_of_the_user_still_runs(
    far: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (far / "sitecustomize.py").write_text("import os; os.environ['SITE'] = 'ran'\n")
    monkeypatch.setenv("PYTHONPATH", f"{os.environ.get('PYTHONPATH', '')}:{far}")
    code = (
        "import subprocess\n"
        'check = \'import os; assert os.environ["SITE"] == "ran"; import sitecustomize\'\n'
        "del os.environ['SITE']\nsubprocess.run([sys.executable, '-c', check], check=True)\n"
    )
    run_script(far, code)


UNUSUAL = {
    "a hard link": "os.link(FILE, FAR / 'name'); (FAR / 'name').write_text('new')",
    "a hard link into the folder": "os.link(FILE, 'name'); Path('name').write_text('new')",
    "a folder's descriptor": (
        "d = os.open(FAR, os.O_RDONLY)\n"
        "f = os.open('log.txt', os.O_WRONLY | os.O_TRUNC, dir_fd=d); os.write(f, b'new')"
    ),
    "a mode by a folder's descriptor": (
        "d = os.open(FAR, os.O_RDONLY); os.chmod('log.txt', 0o600, dir_fd=d)"
    ),
    "a mode by a descriptor": "os.fchmod(os.open(FILE, os.O_RDONLY), 0o600)",
    "a mode": "os.chmod(FILE, 0o600)",
    "a time": "os.utime(FILE, (1, 1))",
    "an image": (
        "cv2 = __import__('cv2'); numpy = __import__('numpy'); os.rename(FILE, FAR / 'i.png')\n"
        "cv2.imwrite(str(FAR / 'i.png'), numpy.zeros((9, 9)))"
    ),
    "a table": (
        "import pyarrow, pyarrow.parquet\n"
        "pyarrow.parquet.write_table(pyarrow.table({'x': [1]}), str(FILE))"
    ),
    "a model": (
        "import torch\np = torch.export.export(torch.nn.Linear(1, 1), (torch.zeros(1, 1),))\n"
        "os.rename(FILE, FAR / 'm.pt2'); torch.export.save(p, FAR / 'm.pt2')"
    ),
    "a temporary file that was there": (
        "import tempfile\nPath(tempfile.gettempdir(), 'old').write_text('new')\n"
        "Path(tempfile.gettempdir(), 'made').write_text('new')"
    ),
}


@pytest.mark.slow(parts=8)
@pytest.mark.parametrize("what", UNUSUAL)
def test_unusual_writes_are_undone(far: Path, what: str) -> None:
    temporary = Path(tempfile.gettempdir())
    (temporary / "old").write_text("old")
    before = os.stat(far / "log.txt")
    report = run_script(far, UNUSUAL[what])
    assert report.restore_errors == ()
    assert [(f.name, f.read_text()) for f in far.iterdir()] == [("log.txt", OLD)]
    after = os.stat(far / "log.txt")
    assert (after.st_mode, after.st_mtime_ns) == (before.st_mode, before.st_mtime_ns)
    assert (temporary / "old").read_text() == "old"
    assert (temporary / "made").exists() == ("temporary" in what)


def test_a_mode_is_undone_without_a_copy_of_the_file(far: Path) -> None:
    script = Script(far, "os.chmod(FILE, 0o600)")
    script.wait()
    assert list((far.parent / "cache").rglob("before-*")) == []
    script.kill()
    clean_up(script.folder)


def test_a_journal_in_a_results_folder_is_not_used(far: Path) -> None:
    journal = far.parent / "cloned" / "measurements" / "m" / "scratch" / "journal"
    journal.mkdir(parents=True)
    (journal / "0").write_text("crafted")
    (journal / "entries").write_text(
        "".join(
            f'{{"path": "{far}/log.txt", "was": "{kind}", "kept": "0", "mode": 511}}\n'
            for kind in ("nothing", "file")
        )
    )
    (report,) = clean_up_stale(journal.parents[2])
    assert (far / "log.txt").read_text() == OLD
    assert (journal / "0").exists()
    assert str(journal) in report.restore_errors[0]


@pytest.mark.parametrize("where", ["scratch", "measurement"])
def test_links_in_a_results_folder_are_not_followed(far: Path, where: str) -> None:
    measurements = far.parent / "cloned" / "measurements"
    (far / "scratch" / "root").mkdir(parents=True)
    (far / "scratch" / "root" / "precious").touch()
    if where == "scratch":
        (measurements / "m").mkdir(parents=True)
        (measurements / "m" / "scratch").symlink_to(far / "scratch")
    else:
        measurements.mkdir(parents=True)
        (measurements / "m").symlink_to(far)
    clean_up_stale(measurements)
    assert (far / "scratch" / "root" / "precious").exists()


def test_the_folder_of_journals_is_private(far: Path) -> None:
    script = Script(far, "FILE.write_text('new')")
    script.wait()
    undo = far.parent / "cache" / "nfold" / "undo"
    assert {f.stat().st_mode & 0o777 for f in (undo, *undo.iterdir())} == {0o700}
    script.kill()
    clean_up(script.folder)
    undo.rename(far.parent / "elsewhere")
    undo.symlink_to(far.parent / "elsewhere")
    linked = Script(far, "FILE.write_text('new')", "linked")
    assert f"MachineUnfit: {undo} is a link" in linked.process.communicate("")[1]
    assert (far / "log.txt").read_text() == OLD


def test_a_run_is_undone_although_its_results_folder_was_deleted(far: Path) -> None:
    script = Script(far, "FILE.write_text('new')")
    script.wait()
    wait_until(lambda: script.has_noted("log.txt"))
    script.kill()
    (far.parent / "results-run").rename(far.parent / "gone")
    refused = Script(far, "FILE.write_text('of another')", "other")
    assert "killed" in refused.process.communicate("")[1]
    clean_up(refused.folder)
    assert clean_up_stale(far.parent / "results-other" / "measurements") != []
    assert (far / "log.txt").read_text() == OLD


BUSY = """
for number in range(4):
    (FAR / f"{number}").write_text("new")
    FILE.open("a").write("new")
    os.replace(FAR / f"{number}", FILE)
    os.chmod(FAR / "data", 0o600)
    (FAR / "data").write_text("new")
"""


@pytest.mark.slow
def test_kills_at_random_moments_and_real_runs_afterwards(far: Path) -> None:
    """Each file holds what the user last wrote; old content is there or in a named copy."""
    (far / "data").write_text("before")
    moments, undone, whole_s = random.Random(1), 0, 1.2 * measure_s(far, BUSY)
    cache = far.parent / "cache"
    for number in range(100):
        old = {name: f"{name} of user {number}" for name in ("log.txt", "data")}
        for name, content in old.items():
            (far / name).write_text(content)
        script = Script(far, BUSY, str(number))
        threading.Event().wait(whole_s * moments.random())
        script.kill()
        real = {name: f"{name} of real run {number}" for name in old if moments.random() < 0.5}
        for name, content in real.items():
            (far / name).write_text(content)
        for _ in range(2):  # the second finds nothing to do
            reports = clean_up_stale(script.measurements)
            said = " ".join(error for report in reports for error in report.restore_errors)
            kept = [f.read_text() for f in cache.rglob("before-*") if str(f) in said]
            undone += bool(reports) and not said
            for name, content in old.items():
                now = (far / name).read_text()
                assert now == real.get(name, now), number
                wrote = bool(reports) and content not in (now, *kept)
                assert not wrote or (name in real and now != content), (number, name)
        for file in far.iterdir():
            file.unlink()
    assert undone


DATABASE_BUSY = """
import sqlite3
made = sqlite3.connect(FAR / "db")
for number in range(4):
    made.execute("insert into t values (?)", (-number - 1,))
    made.execute("delete from t where x = ?", (number,))
    made.commit()
    if number == 1:
        made.execute("pragma wal_checkpoint")
"""


@pytest.mark.slow
@pytest.mark.parametrize("wal", [True, False])
def test_kills_at_random_moments_while_a_database_changes(far: Path, wal: bool) -> None:
    """It is valid and as it was; or as it is now, and the old one is in a copy that is named."""
    moments, undone, before = random.Random(2), 0, list[int]()
    database(far, wal=wal).close()
    whole_s = 1.2 * measure_s(far, DATABASE_BUSY)
    (far / "db").unlink()
    for number in range(50):
        database(far, wal=wal).close()
        old = (far / "db").read_bytes()
        script = Script(far, DATABASE_BUSY, str(number))
        threading.Event().wait(whole_s * moments.random())
        script.kill()
        real = moments.random() < 0.3
        if real:
            reopened = sqlite3.connect(far / "db")
            before = [x for (x,) in reopened.execute("select x from t")]
            reopened.execute("insert into t values (1000)")
            reopened.commit()
            reopened.close()
        reports = clean_up_stale(script.measurements)
        kept = [content for report in reports for content in copies(far, report)]
        undone += bool(reports) and not kept
        found = sqlite3.connect(far / "db")
        assert found.execute("pragma integrity_check").fetchall() == [("ok",)], number
        rows = [x for (x,) in found.execute("select x from t")]
        found.close()
        if real:
            assert rows == [*before, 1000], number
        assert (before if real else rows) == list(range(500)) or old in kept, number
        for file in far.iterdir():
            file.unlink()
    assert undone
