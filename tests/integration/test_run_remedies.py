"""`nfold run --with`: a real script gets the remedies of nfold.toml, and only where they hold."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nfold.core.workload import Workload
from nfold.telemetry.machine_inspection import inspect_machine
from nfold.tune.settings_file import KeptRemedy, TunedSettings

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]
LIMIT_S = 120.0

TRAIN = """
import json, os, sys
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset, get_worker_info

class Images(TensorDataset):
    def __getitem__(self, index):
        info = get_worker_info()
        return *super().__getitem__(index), 0 if info is None else info.num_workers

def train(**meeting):
    dist.init_process_group("gloo", **meeting)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    images, labels = torch.randn(32, 3, 8, 8), torch.randint(4, (32,))
    own = slice(dist.get_rank(), None, dist.get_world_size())
    test = DataLoader(Images(images, labels), batch_size=8)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 4))
    model = DistributedDataParallel(net, find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, workers, tested = [], [], []
    for epoch in range(3):
        loader = DataLoader(Images(images[own], labels[own]), batch_size=4)
        for batch, target, count in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(batch), target)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            workers.append(int(count[0]))
        for batch, _, count in test:
            with torch.no_grad():
                model(batch)
            tested.append(int(count[0]))
    if dist.get_rank() == 0:
        print(json.dumps({
            "threads": torch.get_num_threads(),
            "variable": os.environ.get("PYTORCH_CUDA_ALLOC_CONF"),
            "strides": net[0].weight.stride(),
            "find_unused_parameters": model.find_unused_parameters,
            "gradient_as_bucket_view": model.gradient_as_bucket_view,
            "broadcast_buffers": model.broadcast_buffers,
            "comm_hook": model._get_ddp_logging_data().get("comm_hook"),
            "workers": sorted(set(workers)),
            "tested": sorted(set(tested)),
            "losses": losses,
            "steps": len(losses),
        }))
    dist.destroy_process_group()
"""
DIRECT = f"{TRAIN}\nif __name__ == '__main__':\n    train()\n"
# One process that starts its ranks itself.
SPAWNED = f"""{TRAIN}
def work(rank):
    train(init_method=f"file://{{os.getcwd()}}/meeting", rank=rank, world_size=2)

if __name__ == "__main__":
    torch.multiprocessing.start_processes(work, nprocs=2, start_method="METHOD")
"""
LINEAR = """
import torch
from torch import nn
model = nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
"""
SAME = {"workers": 2, "find_unused_parameters": False, "gradient_as_bucket_view": True}


class TunedPlace:
    """A folder with a script, its nfold.toml, and ``nfold run`` in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def keep(self, text: str, remedies: dict[str, Any], **changes: Any) -> TunedSettings:
        """Write the script, and settings for two CPU devices of this machine."""
        (self.folder / "train.py").write_text(text)
        workload, machine = Workload.from_script("train.py"), inspect_machine()
        settings = TunedSettings(
            command=workload.script,
            code=workload.code,
            device="cpu",
            devices=2,
            machine=machine.id,
            remedies=tuple(KeptRemedy(name=n, value=v) for n, v in remedies.items()),
        )
        settings = dataclasses.replace(settings, **changes)
        settings.write(self.folder / "nfold.toml")
        return settings

    def run(self, *command: str) -> tuple[int, str, str]:
        done = subprocess.run(
            [sys.executable, "-m", "nfold", "run", *command],
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        return done.returncode, done.stdout, done.stderr

    def seen(self, *command: str) -> tuple[dict[str, Any], str]:
        """Return what the script has printed, and the lines of nfold about remedies."""
        code, out, err = self.run(*command)
        assert code == 0, err
        said = [line for line in err.splitlines() if "applied" in line]
        return json.loads(out.splitlines()[-1]), "\n".join(said)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TunedPlace:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return TunedPlace(tmp_path)


@pytest.mark.slow(parts=8)
def test_remedies_with_the_same_numbers(place: TunedPlace) -> None:
    place.keep(DIRECT, SAME)
    before, _ = place.seen("--devices", "cpu:2", "train.py")
    after, said = place.seen("--with", "nfold.toml", "train.py")
    assert said == ""
    assert [before[n] for n in SAME] == [[0], True, False]
    assert [after[n] for n in SAME] == [[2], False, True]
    same = set(before) - set(SAME)
    assert {n: after[n] for n in same} == {n: before[n] for n in same}
    assert after["steps"] == 12
    assert after["tested"] == [0]


@pytest.mark.slow
def test_every_other_kind_of_remedy(place: TunedPlace) -> None:
    kept: dict[str, Any] = {"channels_last": True, "threads": 2, "broadcast_buffers": False}
    kept["gradient_compression"] = "fp16"
    settings = place.keep(DIRECT, {**kept, "expandable_segments": True, "anomaly_detection": False})
    before, _ = place.seen("--devices", "cpu:2", "train.py")
    after, said = place.seen("--watch", "--with", "nfold.toml", "train.py")
    assert (before["strides"], after["strides"]) == ([27, 9, 3, 1], [27, 1, 9, 3])
    assert (before["threads"], after["threads"]) == (1, 2)
    assert (before["broadcast_buffers"], after["broadcast_buffers"]) == (True, False)
    assert before["comm_hook"] is None
    assert after["comm_hook"]
    assert after["losses"] != before["losses"] == pytest.approx(after["losses"], abs=1e-2)
    assert said.splitlines() == [
        "nfold: expandable_segments was not applied: CPU devices use the system's memory, which has "
        "no segments",
        "nfold: anomaly_detection was not applied: no anomaly detection in the script",
    ]
    assert settings.run_remedies("cuda").variant.environment({}) == {
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"
    }


@pytest.mark.slow(parts=8)
def test_what_a_script_does_not_have_is_said_once(place: TunedPlace) -> None:
    place.keep(LINEAR, {**SAME, "channels_last": True, "threads": 1})
    code, _, err = place.run("--with", "nfold.toml", "train.py")
    assert code == 0, err
    assert sorted(line for line in err.splitlines() if "applied" in line) == [
        "nfold: channels_last was not applied: no convolution",
        "nfold: find_unused_parameters was not applied: no DistributedDataParallel",
        "nfold: gradient_as_bucket_view was not applied: no DistributedDataParallel",
        "nfold: workers was not applied: no DataLoader of the training",
    ]


@pytest.mark.slow
def test_a_module(place: TunedPlace) -> None:
    (place.folder / "package").mkdir()
    (place.folder / "package" / "__init__.py").touch()
    (place.folder / "package" / "train.py").write_text(DIRECT)
    workload = Workload.from_module("package.train")
    place.keep(DIRECT, SAME, command=workload.script, code=workload.code)
    after, said = place.seen("--with", "nfold.toml", "-m", "package.train")
    assert said == ""
    assert [after[n] for n in SAME] == [[2], False, True]
    code, _, err = place.run("--with", "nfold.toml", "train.py")
    assert code == 2
    assert "train.py is not what was measured" in err


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_a_script_that_starts_its_ranks(place: TunedPlace, method: str) -> None:
    # PyTorch waits 5 s for each loader worker of a spawned process.
    kept = {**SAME, "channels_last": True}
    del kept["workers"]
    place.keep(SPAWNED.replace("METHOD", method), kept, ranks=1)
    after, said = place.seen("--with", "nfold.toml", "train.py")
    assert said == ""
    assert [after[n] for n in SAME] == [[0], False, True]
    assert after["strides"] == [27, 1, 9, 3]


@pytest.mark.slow
def test_one_device(place: TunedPlace) -> None:
    place.keep(DIRECT, {"workers": 1, "channels_last": True}, devices=1)
    after, said = place.seen("--with", "nfold.toml", "train.py")
    assert said == ""
    assert (after["workers"], after["strides"]) == ([1], [27, 1, 9, 3])


@pytest.mark.slow(parts=8)
def test_what_does_not_match_needs_force(place: TunedPlace) -> None:
    place.keep(LINEAR, {**SAME, "threads": 1}, machine="0123456789", description="64 cores")
    code, _, err = place.run("--with", "nfold.toml", "train.py")
    assert code == 4
    assert "machine 0123456789 (64 cores), this is" in err
    place.keep(LINEAR, {**SAME, "threads": 1})
    command = ("--devices", "cpu:1", "--with", "nfold.toml", "train.py", "--epochs", "3")
    code, _, err = place.run(*command)
    assert code == 4
    assert "measured with 2 CPU ranks, this run has 1 CPU rank" in err
    (place.folder / "train.py").write_text(f"{LINEAR}\n# changed\n")
    code, _, err = place.run(*command)
    assert code == 2
    assert "or --force applies" in err
    code, _, err = place.run("--force", *command)
    assert code == 0
    warnings = [line for line in err.splitlines() if line.startswith("nfold: warning: ")]
    for words in (
        "train.py is not what was measured",
        "measured with 2 CPU ranks",
        "measured with arguments (none), this run has --epochs 3",
    ):
        assert [words in line for line in warnings].count(True) == 1
    assert "find_unused_parameters was not applied: on one device" in err


@pytest.mark.parametrize(
    ("flags", "text", "words"),
    [
        (("--force",), "", "--force applies to --with"),
        (("--with", "gone.toml"), "", "gone.toml does not exist"),
        (("--with", "nfold.toml"), "exchange = 'none'", "'exchange': it only measures"),
        (("--with", "nfold.toml", "--no-python"), "", "--with needs a Python script"),
    ],
)
def test_bad_options(place: TunedPlace, flags: tuple[str, ...], text: str, words: str) -> None:
    place.keep(LINEAR, {})
    with (place.folder / "nfold.toml").open("a") as file:
        file.write(f"[tune.remedies]\n{text}\n")
    code, _, err = place.run(*flags, "train.py")
    assert code == 2
    assert words in err
