"""A measurement's scratch folder: entered for scripts alone, settled into doubts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from made import machine, plan
from nfold.core.source_location import SANDBOX_ROOTS
from nfold.core.variant import Variant
from nfold.core.workload import Workload
from nfold.engines.base import Task
from nfold.launch.handoff import HandoffFolder
from nfold.launch.workload_process import enter_sandbox, settle_sandbox
from nfold.sandbox.audit_events import AUDIT_HOOK

HOST = machine()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HandoffFolder]:
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    Path("train.py").write_text("print('hello')\n")
    made = HandoffFolder(tmp_path / "results" / "measurements" / "m")
    made.path.mkdir(parents=True)
    yield made
    AUDIT_HOOK.set_listener(None)
    SANDBOX_ROOTS.clear()


def _task(workload: Workload, ablation: Variant | None = None, rank: int = 0) -> Task:
    asked = plan(HOST, devices=2)
    return Task(workload=workload, plan=asked, machine=HOST, requested_variant=ablation, rank=rank)


def test_a_workload_has_none(folder: HandoffFolder) -> None:
    here = os.getcwd()
    asked = _task(Workload(name="digits"))
    assert enter_sandbox(asked, folder) is asked
    assert os.getcwd() == here
    assert settle_sandbox(folder) == []


def test_a_script_runs_there_and_what_it_wrote_is_told(folder: HandoffFolder) -> None:
    here = Path.cwd()
    asked = enter_sandbox(_task(Workload.from_script(str(here / "train.py"), "--lr", "1")), folder)
    path, *arguments = asked.workload.script
    assert arguments == ["--lr", "1"]
    assert path == str(folder.path / "scratch" / "root") + str(here / "train.py")
    Path("out.txt").write_text("new")
    AUDIT_HOOK.set_listener(None)
    os.chdir(here)
    (doubt,) = settle_sandbox(folder)
    assert doubt.kind == "would_have_written"
    assert doubt.text.startswith("would have written 1 file (3 bytes): out.txt")
    assert os.listdir(folder.path) == []


def test_independent_ranks_have_their_own_mirror(folder: HandoffFolder) -> None:
    enter_sandbox(
        _task(Workload.from_script("train.py"), Variant(independent=True), rank=1), folder
    )
    assert Path.cwd().is_relative_to(folder.path / "scratch" / "root-1")
