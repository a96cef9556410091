"""A measurement's scratch folder: entered for scripts alone, settled into doubts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from made import machine, plan
from nfold.ablation import Ablation
from nfold.frameworks.base import Task
from nfold.frameworks.scratch.events import HOOK
from nfold.place import MIRRORS
from nfold.run.handoff import Folder
from nfold.run.scratch import in_scratch, settle
from nfold.workload import Workload

HOST = machine()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Folder]:
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    Path("train.py").write_text("print('hello')\n")
    made = Folder(tmp_path / "results" / "measurements" / "m")
    made.path.mkdir(parents=True)
    yield made
    HOOK.listen(None)
    MIRRORS.clear()


def _task(workload: Workload, ablation: Ablation | None = None, rank: int = 0) -> Task:
    asked = plan(HOST, devices=2)
    return Task(workload=workload, plan=asked, machine=HOST, ablation=ablation, rank=rank)


def test_a_workload_has_none(folder: Folder) -> None:
    here = os.getcwd()
    asked = _task(Workload(name="digits"))
    assert in_scratch(asked, folder) is asked
    assert os.getcwd() == here
    assert settle(folder) == []


def test_a_script_runs_there_and_what_it_wrote_is_told(folder: Folder) -> None:
    here = Path.cwd()
    asked = in_scratch(_task(Workload.of_script(str(here / "train.py"), "--lr", "1")), folder)
    path, *arguments = asked.workload.script
    assert arguments == ["--lr", "1"]
    assert path == str(folder.path / "scratch" / "root") + str(here / "train.py")
    Path("out.txt").write_text("new")
    HOOK.listen(None)
    os.chdir(here)
    (doubt,) = settle(folder)
    assert doubt.kind == "would_have_written"
    assert doubt.text == "would have written 1 file (3 bytes): out.txt"
    assert os.listdir(folder.path) == []


def test_copies_that_are_alone_share_nothing(folder: Folder) -> None:
    in_scratch(_task(Workload.of_script("train.py"), Ablation(independent=True), rank=1), folder)
    assert os.listdir(folder.path) == ["scratch-1"]
