"""Autograd's anomaly detection in a script: seen with its line, left out where that is asked."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.fx import traceback as stacks
from torch.utils.data import DataLoader

from instrumented import RecordingObserver, dataset, instrumented, loop, model, script_task, usual
from nfold.core.variant import Variant

WITHOUT = Variant(anomaly_detection=False)


@pytest.fixture(autouse=True)
def _off_again() -> Iterator[None]:
    yield
    torch.autograd.set_detect_anomaly(False)


class Looking(nn.Module):
    """Notes in every forward whether the detection is on."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = model()
        self.noted: list[bool] = []

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        """The scores."""
        self.noted.append(torch.is_anomaly_enabled())
        scores: torch.Tensor = self.inner(samples)
        return scores


def _for_good(module: nn.Module, *, on: bool = True) -> None:
    torch.autograd.set_detect_anomaly(on)
    loop(DataLoader(dataset(), 8), module, torch.optim.SGD(module.parameters(), lr=0.1))


def _in_every_step(module: nn.Module) -> None:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for samples, labels in [*DataLoader(dataset(), 8)] * 8:
        with torch.autograd.detect_anomaly():
            loss = nn.functional.cross_entropy(module(samples), labels)
            loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()


BOTH = pytest.mark.parametrize("training", [_for_good, _in_every_step])


@BOTH
def test_anomaly_detection_is_recorded_with_its_line(training: Callable[[nn.Module], None]) -> None:
    module = Looking()
    seen = instrumented(lambda: training(module), script_task()).profile
    assert seen.detects_anomalies
    assert all(module.noted)
    assert str(seen.most_frequent_line("anomaly")).startswith("tests/unit/instrument/hooks/")


@pytest.mark.parametrize("asked", [False, True])
def test_disabled_anomaly_detection_is_not_recorded(*, asked: bool) -> None:
    """Also where a script itself says that it is to be."""
    training = (lambda: _for_good(Looking(), on=False)) if asked else usual
    assert not instrumented(training, script_task()).profile.detects_anomalies


@BOTH
def test_anomaly_detection_is_disabled_in_a_whole_run(
    training: Callable[[nn.Module], None],
) -> None:
    module = Looking()
    instrumented(lambda: training(module), script_task(WITHOUT))
    assert module.noted
    assert not any(module.noted)


@BOTH
def test_anomaly_detection_is_interleaved(training: Callable[[nn.Module], None]) -> None:
    module = Looking()
    task = dataclasses.replace(script_task(steps=8), interleaved_variants=(Variant(), WITHOUT))
    found: RecordingObserver = instrumented(lambda: training(module), task)
    assert found.samples is not None
    assert sorted(set(found.samples.slots)) == [0, 1]
    assert module.noted[: task.plan.warmup_steps] == [True] * task.plan.warmup_steps
    assert 8 <= module.noted.count(False) < len(module.noted) - 8


def test_operator_stack_has_only_frames_of_the_script() -> None:
    found: dict[str, list[str]] = {}

    def training() -> None:
        found["main"] = stacks.format_stack()
        other = threading.Thread(target=lambda: found.update(other=stacks.format_stack()))
        other.start()
        other.join()

    instrumented(training, script_task())
    assert len(stacks.format_stack()) > len(found["main"])
    assert "test_anomaly_detection.py" in found["main"][0]
    assert "training" in found["main"][-1]
    assert "threading.py" in found["other"][0]
