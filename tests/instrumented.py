"""Run a training in the process of a test, instrumented as in a rank."""

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
from nfold.instrument.rank_environment import AffinityHook
from nfold.instrument.session import InstrumentedRun

FEATURES, CLASSES = 8, 4


class FakeClock:
    """Time that advances only by calls of ``sleep`` and ``advance``."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.advance(seconds)

    def advance(self, seconds: float) -> None:
        self.now += seconds


def install_fake_clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    """Replace the time of all modules that measure a script, except the stack sampler."""
    clock = FakeClock()
    for module in (step_clock, epoch_boundaries, run_length):
        monkeypatch.setattr(module, "time", clock)
    return clock


class RankExit(SystemExit):
    """Raised in place of ending the process of a rank."""


class RecordingObserver(Observer):
    """Keeps the profile and the samples of a rank; its exit raises ``RankExit``."""

    def __init__(self) -> None:
        self.profile = ScriptProfile()
        self.samples: RankSamples | None = None
        self.phases: list[Phase] = []

    def beat(self, phase: Phase, step: int, total: int = 0) -> None:
        self.phases.append(phase)

    def save_profile(self, profile: ScriptProfile) -> None:
        self.profile = profile

    def exit_process(self, samples: RankSamples) -> NoReturn:
        self.samples = samples
        raise RankExit(0)


def script_task(variant: Variant | None = None, world_size: int = 1, **changes: Any) -> Any:
    """Return the task of a rank of a script; ``changes`` are fields of its plan."""
    settings: dict[str, Any] = {
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
        plan=Plan(**{**settings, **changes}),
        requested_variant=variant,
    )


def instrumented(training: Callable[[], object], task: Any) -> RecordingObserver:
    """Run a training in an instrumented rank, until its steps are made or it ends."""
    observer = RecordingObserver()
    run = InstrumentedRun(task, observer, TrainerDetector(1), AffinityHook())
    run.install()
    try:
        training()
        observer.samples = run.samples()
    except RankExit:
        pass
    finally:
        run.uninstall()
    return observer


def overrides(task: Any) -> LoaderOverrides:
    """Return the overrides of a task, in a training whose step count grows with each query."""
    return LoaderOverrides(task, itertools.count().__next__)


def dataset(samples: int = 64) -> TensorDataset:
    """Return the same samples and labels in every call."""
    draw = torch.Generator().manual_seed(0)
    labels = torch.randint(0, CLASSES, (samples,), generator=draw)
    return TensorDataset(torch.randn(samples, FEATURES, generator=draw), labels)


class CountingDataset(Dataset[Any]):
    """Counts its reads."""

    def __init__(self, samples: int = 64) -> None:
        self.samples = dataset(samples)
        self.read = 0

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        self.read += 1
        return self.samples[index]


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.Linear(16, CLASSES))


def loop(
    loader: Any,
    module: nn.Module,
    *optimizers: Any,
    epochs: int = 100,
    accumulate: int = 1,
    after_epoch: Callable[[], object] = lambda: None,
) -> None:
    """Train with a plain PyTorch loop."""
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
    """Train a small model on ``dataset``."""
    module = model()
    loader = DataLoader(dataset(samples), batch_size=batch, shuffle=True)
    loop(loader, module, torch.optim.SGD(module.parameters(), lr=0.1), **how)


def reset_compiler() -> None:
    """Reset torch.compile to the state of a new process."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def train_with_scaler(after_step: Callable[[], object] = lambda: None) -> None:
    """Train with a GradScaler that skips every second step, because it overflows."""
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
