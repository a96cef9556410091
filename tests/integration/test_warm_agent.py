"""An agent that has started before its run: it runs it like any other, and none is left over."""

from __future__ import annotations

import json
import signal
import sys
import time
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from nfold.launch.handoff import HandoffFolder
from nfold.launch.launch_spec import ProcessSpec, RankGroup, RunOptions, WarmAgent, agent_command
from nfold.launch.supervisor import Supervisor, TreeExit

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]
RANK = """
import json, os, sys
said = {name: os.environ.get(name) for name in ("RANK", "OF_THIS_RUN", "OF_NOBODY")}
open(os.path.join(sys.argv[1], f"said-{said['RANK']}.json"), "w").write(json.dumps(said))
sys.exit(int(sys.argv[2]))
"""


@pytest.fixture
def folder(tmp_path: Path) -> HandoffFolder:
    return HandoffFolder(tmp_path)


def _launch(folder: HandoffFolder, code: int = 0, **environment: str) -> ProcessSpec:
    command = (sys.executable, "-c", RANK, str(folder.path), str(code))
    root = agent_command(folder, RankGroup(processes=2, command=command))
    return ProcessSpec(command=root, environment=environment, processes=2, may_use_warm_agent=True)


def _run(folder: HandoffFolder, launch: ProcessSpec, spare: WarmAgent) -> TreeExit:
    return Supervisor(folder, launch, RunOptions(results=folder.path, warm_agent=spare)).run()


def _waiting() -> list[psutil.Process]:
    """This process's agents that have no folder yet."""
    children = psutil.Process().children()
    return [child for child in children if child.cmdline()[-1:] == ["nfold.launch.agent"]]


def _the_one_that_waits() -> psutil.Process:
    """It may not yet be what it becomes, right after it was started."""
    while not (found := _waiting()):
        time.sleep(0.01)
    (one,) = found
    return one


def test_the_second_run_takes_the_agent_that_waits(
    folder: HandoffFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(WarmAgent()) as spare:
        monkeypatch.setenv("OF_NOBODY", "gone before the second run")
        assert _run(folder, _launch(folder), spare).exit_code == 0
        waited = _the_one_that_waits()
        monkeypatch.delenv("OF_NOBODY")
        assert _run(folder, _launch(folder, OF_THIS_RUN="1"), spare).exit_code == 0
        assert not waited.is_running()
        next_one = _the_one_that_waits()
    assert not next_one.is_running()
    said = [json.loads((folder.path / f"said-{rank}.json").read_text()) for rank in (0, 1)]
    assert said == [{"RANK": str(rank), "OF_THIS_RUN": "1", "OF_NOBODY": None} for rank in (0, 1)]


def test_a_rank_s_failure_is_told_as_by_any_agent(folder: HandoffFolder) -> None:
    with closing(WarmAgent()) as spare:
        spare.take(folder, _launch(folder), {})
        assert _run(folder, _launch(folder, code=3), spare).exit_code == 1
    assert 3 in folder.agent.read_exit_codes().values()
    assert "exitcode" in folder.agent_log.read_text()


def test_an_agent_that_somebody_ended_is_not_missed(folder: HandoffFolder) -> None:
    with closing(WarmAgent()) as spare:
        spare.take(folder, _launch(folder), {})
        waited = _the_one_that_waits()
        waited.send_signal(signal.SIGKILL)
        waited.wait()
        assert spare.take(folder, _launch(folder), {}) is None
        assert _run(folder, _launch(folder), spare).exit_code == 0


def test_a_run_whose_agent_may_not_wait_starts_none(folder: HandoffFolder) -> None:
    with closing(WarmAgent()) as spare:
        launch = _launch(folder)
        own = ProcessSpec(command=launch.command, environment={}, processes=2)
        assert _run(folder, own, spare).exit_code == 0
        assert _waiting() == []
