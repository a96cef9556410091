"""Ranks of a script that are forked from a process with its libraries: they train as new ones."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from nfold.core.measurement import Measurement
from nfold.core.plan import Plan
from nfold.core.script_profile import LoadedLibraries
from nfold.core.variant import Variant
from nfold.core.workload import Workload
from nfold.launch.handoff import HandoffFolder
from nfold.launch.launch_spec import AgentServer, RunOptions
from nfold.launch.warm_process import import_libraries
from nfold.launch.workload_run import run
from nfold.telemetry.machine_inspection import inspect_machine
from nfold.tune.runs.losses import LossReference, first_losses

pytestmark = [pytest.mark.integration, pytest.mark.timeout(200)]
SCRIPT = """
import sys
LOADED = "wave" in sys.modules
import json, os
import numpy
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

several = int(os.environ.get("WORLD_SIZE", 1)) > 1
if several:
    dist.init_process_group("gloo")
print(json.dumps({"program": sys.orig_argv, "random": numpy.random.rand(), "loaded": LOADED}))
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
model = DistributedDataParallel(model) if several else model
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.randn(64, 8))
sampler = torch.utils.data.DistributedSampler(data) if several else None
while True:
    for (batch,) in torch.utils.data.DataLoader(data, batch_size=4, sampler=sampler):
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


def measure(
    folder: Path,
    devices: int,
    server: AgentServer,
    variables: tuple[tuple[str, str], ...] = (),
    modules: tuple[str, ...] = ("numpy", "torch", "wave", "pyarrow"),
) -> tuple[Measurement, list[dict[str, Any]]]:
    """Run the script; return the measurement and what each rank printed first."""
    host = inspect_machine()
    if host.cores < devices:
        pytest.skip("a CPU device needs a core of its own")
    plan = Plan(
        device="cpu", devices=devices, cores_per_device=1, steps=20, warmup_steps=4, strategy="ddp"
    )
    libraries = LoadedLibraries(modules=modules, variables=variables)
    options = RunOptions(results=folder, agent_server=server, libraries=libraries)
    workload = Workload.from_script(str(folder / "train.py"))
    found = run(workload, plan, Variant(), machine=host, options=options)
    assert found.status == "ok", found.cause
    assert found.folder is not None
    ranks = HandoffFolder(folder / found.folder)
    logs = [ranks.rank_log(rank).read_text() for rank in range(devices)]
    return found, [json.loads(log.splitlines()[0]) for log in logs]


@pytest.mark.slow(parts=8)
@pytest.mark.parametrize("devices", [1, 2])
def test_ranks_of_a_waiting_process_train_as_new_ones(tmp_path: Path, devices: int) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    with closing(AgentServer(str(tmp_path / "train.py"))) as server:
        cold, first = measure(tmp_path, devices, server)
        warm, second = measure(tmp_path, devices, server)
    assert not any(said["loaded"] for said in first)
    assert all(said["loaded"] for said in second)
    assert all(said["program"][-1] == "nfold.launch.agent" for said in second)
    assert len({said["random"] for said in second}) == devices
    assert LossReference((first_losses(cold),)).objection(first_losses(warm), "same") is None


@pytest.mark.slow
def test_a_variable_that_configures_libraries_needs_new_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    with closing(AgentServer(str(tmp_path / "train.py"))) as server:
        measure(tmp_path, 1, server)
        monkeypatch.setenv("MKL_DYNAMIC", "FALSE")
        _, (said,) = measure(tmp_path, 1, server)
        monkeypatch.delenv("MKL_DYNAMIC")
        _, (later,) = measure(tmp_path, 1, server)
    assert (said["loaded"], later["loaded"]) == (False, True)


@pytest.mark.slow
def test_a_script_that_sets_a_variable_before_its_imports_needs_new_ranks(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    with closing(AgentServer(str(tmp_path / "train.py"))) as server:
        measure(tmp_path, 1, server)
        found, (said,) = measure(tmp_path, 1, server, (("MKL_DYNAMIC", "FALSE"),))
    assert not said["loaded"]
    assert found.folder is not None
    log = HandoffFolder(tmp_path / found.folder).agent_log.read_text()
    assert "ranks start as new programs, not as forks: the script sets MKL_DYNAMIC" in log


@pytest.mark.slow(parts=8)
def test_the_libraries_of_a_script_are_imported_while_its_first_run_goes_on(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    imported, _ = libraries("import torch.distributed, torch.nn.parallel")
    with closing(AgentServer(str(tmp_path / "train.py"))) as server:
        measure(tmp_path, 1, server, modules=())
        _, (said,) = measure(tmp_path, 1, server, modules=tuple(imported))
    assert said["program"][-1] == "nfold.launch.agent"


@pytest.mark.slow
def test_a_library_that_the_first_run_did_not_import_needs_new_ranks(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    imported, _ = libraries("import torch.distributed, torch.nn.parallel")
    without = tuple(name for name in imported if not name.startswith("numpy."))
    with closing(AgentServer(str(tmp_path / "train.py"))) as server:
        measure(tmp_path, 1, server, modules=())
        found, (said,) = measure(tmp_path, 1, server, modules=without)
    assert said["program"][-1] != "nfold.launch.agent"
    assert found.folder is not None
    log = HandoffFolder(tmp_path / found.folder).agent_log.read_text()
    assert "the script has not imported numpy." in log


@pytest.mark.slow(parts=8)
def test_imports_of_a_script_are_those_of_packages_that_every_run_makes(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("raise SystemExit('a module of the user')")
    script = tmp_path / "train.py"
    script.write_text(
        "import own, wave\nfrom rich.panel import Panel\nfrom rich import *\n"
        "if False:\n    import rich.emoji\ndef later():\n    import rich.tree\n"
    )
    code = (
        "import sys; sys.path.insert(0, sys.argv[2]); from nfold.launch import warm_process\n"
        "found = warm_process.import_libraries_of(sys.argv[1])\n"
        "print([name in found for name in ('rich.panel', 'rich.tree', 'wave', 'own')])\n"
        "print(warm_process.import_libraries_of(sys.argv[2]) == frozenset())"
    )
    command = [sys.executable, "-c", code, str(script), str(tmp_path)]
    printed = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    assert printed.splitlines() == ["[True, False, False, False]", "True"]


def test_only_what_can_be_imported_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "leaving.py").write_text("raise SystemExit(3)")
    (tmp_path / "found_there.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    import_libraries(["leaving", "not_installed_anywhere", "found_there"])
    assert "found_there" in sys.modules
    del sys.modules["found_there"]


PRINT_LIBRARIES = """
import json, os, sys
import torch
from nfold.instrument.loaded_libraries import loaded_libraries

torch.optim.AdamW(torch.nn.Linear(4, 4).parameters())
{change}
found = loaded_libraries()
print(json.dumps([found.modules, dict(found.variables)]))
"""


def libraries(change: str = "") -> tuple[list[str], dict[str, str]]:
    command = [sys.executable, "-c", PRINT_LIBRARIES.format(change=change)]
    modules, variables = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return modules, variables


@pytest.mark.slow(parts=8)
def test_libraries_are_the_modules_that_a_script_has_imported_from_packages() -> None:
    found, variables = libraries()
    assert {"torch", "torch.optim.adamw", "torch._dynamo"} <= set(found)
    assert not any(name.startswith(("json", "nfold", "torch._inductor")) for name in found)
    assert variables == {}


@pytest.mark.slow(parts=8)
def test_variables_that_a_script_or_its_imports_have_set_are_noted() -> None:
    _, variables = libraries("os.environ['OMP_NUM_THREADS'] = '3'")
    assert variables == {"OMP_NUM_THREADS": "3"}
    # The driver reads the first when a GPU starts, Python the second when it starts.
    _, variables = libraries("os.environ.update(CUDA_MODULE_LOADING='LAZY', PYTHONPATH='/new')")
    assert variables == {}
