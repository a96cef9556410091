"""A training in the test's own process, watched as a script's is in a rank."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, NoReturn

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import made
from nfold.core.measurement import RankSamples
from nfold.core.plan import Plan
from nfold.core.script_profile import ScriptProfile
from nfold.core.variant import Variant
from nfold.core.workload import Workload
from nfold.engines import step_clock
from nfold.engines.base import Observer, Phase
from nfold.instrument import epoch_boundaries, run_length
from nfold.instrument.hooks.patches import TrainerDetector
from nfold.instrument.input.dataloader_hook import LoaderOverrides
from nfold.instrument.session import InstrumentedRun

FEATURES, CLASSES = 8, 4


class Seconds:
    """Time that passes only where a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.pass_by(seconds)

    def pass_by(self, seconds: float) -> None:
        self.now += seconds


def passing(monkeypatch: pytest.MonkeyPatch) -> Seconds:
    """Such time for all that times a script."""
    found = Seconds()
    for module in (step_clock, epoch_boundaries, epoch_boundaries, epoch_boundaries, run_length):
        monkeypatch.setattr(module, "time", found)
    return found


class Left(SystemExit):
    """The process of a rank would have ended here."""


class Noting(Observer):
    """Keeps what a rank tells; leaving it raises ``Left``."""

    def __init__(self) -> None:
        self.seen = ScriptProfile()
        self.samples: RankSamples | None = None
        self.phases: list[Phase] = []

    def beat(self, phase: Phase, step: int, total: int = 0) -> None:
        self.phases.append(phase)

    def save_profile(self, seen: ScriptProfile) -> None:
        self.seen = seen

    def exit_process(self, samples: RankSamples) -> NoReturn:
        self.samples = samples
        raise Left(0)


def script_task(ablation: Variant | None = None, world_size: int = 1, **changes: Any) -> Any:
    """A rank's task of a script that says what it needs and imposes nothing."""
    said: dict[str, Any] = {
        "device": "cpu",
        "devices": world_size,
        "cores_per_device": 1,
        "strategy": "single" if world_size == 1 else "ddp",
        "steps": 10,
        "warmup_steps": 4,
    }
    return dataclasses.replace(
        made.task(world_size=world_size),
        workload=Workload(name="train.py", script=("train.py",)),
        plan=Plan(**{**said, **changes}),
        requested_variant=ablation,
    )


def watched(training: Callable[[], object], task: Any) -> Noting:
    """What a rank told of the training, which may end by itself."""
    noting = Noting()
    watch = InstrumentedRun(task, noting, TrainerDetector(1))
    watch.install()
    try:
        training()
        noting.samples = watch.samples()
    except Left:
        pass
    finally:
        watch.uninstall()
    return noting


def overrides(task: Any) -> LoaderOverrides:
    """What a plan imposes, in a training that makes a step whenever it is asked."""
    return LoaderOverrides(task, itertools.count().__next__)


def dataset(samples: int = 64) -> TensorDataset:
    """Samples and labels, the same every time."""
    draw = torch.Generator().manual_seed(0)
    labels = torch.randint(0, CLASSES, (samples,), generator=draw)
    return TensorDataset(torch.randn(samples, FEATURES, generator=draw), labels)


class Reading(Dataset[Any]):
    """Counts what is read of it."""

    def __init__(self, samples: int = 64) -> None:
        self.of = dataset(samples)
        self.read = 0

    def __len__(self) -> int:
        return len(self.of)

    def __getitem__(self, index: int) -> Any:
        self.read += 1
        return self.of[index]


def model() -> nn.Sequential:
    """A small one."""
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.Linear(16, CLASSES))


def loop(
    loader: Any,
    module: nn.Module,
    *optimizers: Any,
    epochs: int = 100,
    accumulate: int = 1,
    after_epoch: Callable[[], object] = lambda: None,
) -> None:
    """What people write."""
    for _ in range(epochs):
        for number, (samples, labels) in enumerate(loader, start=1):
            loss = nn.functional.cross_entropy(module(samples), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            if number % accumulate == 0:
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
        after_epoch()


def usual(samples: int = 64, batch: int = 8, **how: Any) -> None:
    """A whole training of it."""
    module = model()
    loader = DataLoader(dataset(samples), batch_size=batch, shuffle=True)
    loop(loader, module, torch.optim.SGD(module.parameters(), lr=0.1), **how)


def forget_compiled() -> None:
    """PyTorch's compiler as in a new process."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def scaled(after_step: Callable[[], object] = lambda: None) -> None:
    """A training with a GradScaler whose every second step overflows, and is skipped."""
    module = nn.Linear(FEATURES, CLASSES)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    for number, (samples, labels) in enumerate([*DataLoader(dataset(), batch_size=4)] * 2):
        loss = nn.functional.cross_entropy(module(samples), labels)
        scaler.scale(loss * (float("inf") if number % 2 else 1.0)).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        after_step()
