"""A process that starts the agents of runs by fork: they run like others, and none is left over."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from nfold.core.script_profile import LoadedLibraries
from nfold.launch.handoff import HandoffFolder
from nfold.launch.launch_spec import (
    MAX_STARTS,
    AgentServer,
    ProcessSpec,
    RankGroup,
    RunOptions,
    StopRequest,
    agent_command,
)
from nfold.launch.process_tree import adopt_orphans
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
    return ProcessSpec(
        command=root, environment=environment, processes=2, may_use_agent_server=True
    )


def _run(folder: HandoffFolder, launch: ProcessSpec, server: AgentServer) -> TreeExit:
    return Supervisor(folder, launch, RunOptions(results=folder.path, agent_server=server)).run()


def _all_waiting() -> list[psutil.Process]:
    """This process's children that start agents, and have no folder."""
    children = psutil.Process().children()
    return [child for child in children if child.cmdline()[-1:] == ["nfold.launch.agent"]]


of_other_tests: set[psutil.Process] = set()


@pytest.fixture(autouse=True)
def _others() -> None:
    """Tests before these may share a server that stays, see warm_runs."""
    of_other_tests.clear()
    of_other_tests.update(_all_waiting())


def _waiting() -> list[psutil.Process]:
    """Those of this test."""
    return [child for child in _all_waiting() if child not in of_other_tests]


def _the_one_that_waits() -> psutil.Process:
    """It may not yet be what it becomes, right after it was started."""
    while not (found := _waiting()):
        time.sleep(0.01)
    (one,) = found
    return one


def test_all_runs_after_the_first_begin_in_the_process_that_waits(
    folder: HandoffFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(AgentServer()) as server:
        monkeypatch.setenv("OF_NOBODY", "gone before the second run")
        assert _run(folder, _launch(folder), server).exit_code == 0
        waiting = _the_one_that_waits()
        monkeypatch.delenv("OF_NOBODY")
        for number in "12":
            assert _run(folder, _launch(folder, OF_THIS_RUN=number), server).exit_code == 0
            said = [json.loads((folder.path / f"said-{one}.json").read_text()) for one in (0, 1)]
            assert said == [
                {"RANK": str(rank), "OF_THIS_RUN": number, "OF_NOBODY": None} for rank in (0, 1)
            ]
            assert _waiting() == [waiting]
    assert not waiting.is_running()


@pytest.mark.slow(parts=8)
def test_a_rank_s_failure_is_told_as_by_any_agent(folder: HandoffFolder) -> None:
    with closing(AgentServer()) as server:
        assert _run(folder, _launch(folder), server).exit_code == 0
        assert _run(folder, _launch(folder, code=3), server).exit_code == 1
    assert 3 in folder.agent.read_exit_codes().values()
    assert "exitcode" in folder.agent_log.read_text()


@pytest.mark.slow(parts=8)
def test_a_process_that_somebody_ended_is_replaced(folder: HandoffFolder) -> None:
    with closing(AgentServer()) as server:
        assert _run(folder, _launch(folder), server).exit_code == 0
        waiting = _the_one_that_waits()
        waiting.send_signal(signal.SIGKILL)
        waiting.wait()
        assert _run(folder, _launch(folder), server).exit_code == 0
        assert _the_one_that_waits() != waiting


@pytest.mark.slow(parts=8)
def test_a_process_whose_imports_forbid_forks_is_replaced_only_a_few_times(
    folder: HandoffFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    thread = "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True)"
    (folder.path / "threaded.py").write_text(f"{thread}.start()\n")
    monkeypatch.setenv("PYTHONPATH", str(folder.path))
    options = RunOptions(
        results=folder.path,
        agent_server=AgentServer(),
        libraries=LoadedLibraries(modules=("threaded",)),
    )
    assert options.agent_server is not None
    with closing(options.agent_server):
        for number in range(MAX_STARTS + 1):
            assert Supervisor(folder, _launch(folder), options).run().exit_code == 0
            assert len(_waiting()) == (number < MAX_STARTS)
            if number:
                assert "an import started threads: " in folder.agent_log.read_text()


ADOPTING = """
import os, sys, time
from pathlib import Path
from nfold.launch.handoff import HandoffFolder
from nfold.launch.launch_spec import ProcessSpec, RankGroup, AgentServer, agent_command
from nfold.launch.process_tree import adopt_orphans

folder = HandoffFolder(Path(sys.argv[1]))
rank = (sys.executable, "-c", "import time; time.sleep(600)")
launch = ProcessSpec(
    command=agent_command(folder, RankGroup(processes=2, command=rank)), environment={}, processes=2
)
with adopt_orphans():
    server = AgentServer()
    server.start_agent(folder, launch, dict(os.environ))
    print(os.getpid(), server.start_agent(folder, launch, dict(os.environ)).pid, flush=True)
    time.sleep(600)
"""


@pytest.mark.slow(parts=8)
def test_an_agent_is_adopted_and_ends_with_the_process_that_asked_for_it(
    folder: HandoffFolder,
) -> None:
    command = [sys.executable, "-c", ADOPTING, str(folder.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as asking:
        assert asking.stdout is not None
        parent, pid = map(int, asking.stdout.readline().split())
        agent = psutil.Process(pid)
        assert agent.ppid() == parent
        asking.kill()
    agent.wait(timeout=60)


@pytest.mark.slow(parts=8)
def test_where_nobody_adopts_orphans_every_run_has_an_agent_of_its_own(
    folder: HandoffFolder,
) -> None:
    with closing(AgentServer()) as server:
        assert server.start_agent(folder, _launch(folder), {}) is None
        assert server.start_agent(folder, _launch(folder), {}) is None


def test_a_request_to_stop_ends_the_wait_for_imports(folder: HandoffFolder) -> None:
    with closing(AgentServer()) as server, adopt_orphans():
        assert server.start_agent(folder, _launch(folder), {}) is None
        waiting = _the_one_that_waits()
        waiting.suspend()
        stop = StopRequest(signum=signal.SIGINT)
        assert server.start_agent(folder, _launch(folder), {}, stop=stop) is None
        assert not waiting.is_running()


@pytest.mark.slow(parts=8)
def test_a_run_whose_agent_may_not_wait_starts_none(folder: HandoffFolder) -> None:
    with closing(AgentServer()) as server:
        launch = _launch(folder)
        own = ProcessSpec(command=launch.command, environment={}, processes=2)
        assert _run(folder, own, server).exit_code == 0
        assert _waiting() == []
