"""Requests to stop: noted once, at once the second time, put back afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nfold.cli.signals import STOP_SIGNALS, stop_on_signals
from nfold.sandbox.file_claims import journal_folder

TWICE = """
import os, signal
from nfold.cli.signals import stop_on_signals
with stop_on_signals() as stop:
    os.kill(os.getpid(), signal.{first})
    assert stop.signum == signal.{first}
    os.kill(os.getpid(), signal.{second})
    print("still here", flush=True)
"""


@pytest.mark.parametrize("signum", STOP_SIGNALS)
def test_a_signal_is_noted_and_nothing_else(signum: signal.Signals) -> None:
    with stop_on_signals() as stop:
        assert not stop
        os.kill(os.getpid(), signum)
        assert stop
        assert stop.signum == signum


def test_the_handlers_are_put_back() -> None:
    before = {signum: signal.getsignal(signum) for signum in STOP_SIGNALS}
    with stop_on_signals():
        assert all(signal.getsignal(s) != before[s] for s in STOP_SIGNALS)
    assert {signum: signal.getsignal(signum) for signum in STOP_SIGNALS} == before


def test_what_was_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_on_signals() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("first", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_further_interrupt_ends_the_process_at_once(first: str) -> None:
    code = TWICE.format(first=first, second="SIGINT")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 130
    assert done.stdout == ""


def test_an_interrupt_at_once_names_the_command_that_restores_files(tmp_path: Path) -> None:
    sandbox = tmp_path / "results" / "measurements" / "m" / "scratch"
    sandbox.mkdir(parents=True)
    journal = journal_folder(str(sandbox))
    journal.mkdir(parents=True)
    (journal / "entries").touch()
    done = _interrupted_twice(sandbox.parent)
    assert done.returncode == 130
    assert f"nfold explain SCRIPT --results {tmp_path / 'results'}" in done.stderr
    (journal / "entries").unlink()
    journal.rmdir()
    assert _interrupted_twice(sandbox.parent).stderr == ""


def _interrupted_twice(measurement: Path) -> subprocess.CompletedProcess[str]:
    code = TWICE.format(first="SIGINT", second="SIGINT").replace(
        "as stop:\n", f"as stop:\n    stop.abort_notice = notice(Path({str(measurement)!r}))\n"
    )
    imports = (
        "from functools import partial\nfrom pathlib import Path\n"
        "from nfold.launch.handoff import HandoffFolder\n"
        "from nfold.launch.workload_run import _abort_notice\n"
        "notice = lambda path: partial(_abort_notice, HandoffFolder(path))\n"
    )
    command = [sys.executable, "-c", imports + code]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_an_interrupt_during_the_imports_prints_one_line(tmp_path: Path) -> None:
    """The import of the commands interrupts this process itself."""
    interrupt = (
        "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nfor _ in range(10**6): pass\n"
    )
    (tmp_path / "typer.py").write_text(interrupt)
    path = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    done = subprocess.run(
        [sys.executable, "-m", "nfold", "env"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "nfold: stopped by Ctrl-C\n"


def test_a_further_termination_is_patient() -> None:
    code = TWICE.format(first="SIGTERM", second="SIGTERM")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert done.stdout == "still here\n"
