"""Which steps of a script come after something else than the step before, by the host's clock."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from instrumented import (
    FakeClock,
    RecordingObserver,
    dataset,
    install_fake_clock,
    instrumented,
    model,
    script_task,
)
from nfold.core.measurement import RankSamples
from nfold.core.variant import Variant
from nfold.instrument.hooks.patches import BatchFunctionDecorator, installed_decorator

Evaluate = Callable[[], None]
Training = Callable[[FakeClock, nn.Module, torch.optim.Optimizer, Evaluate], None]
EVERY = 5
STEPS, WARMUP = 12, 4


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    return install_fake_clock(monkeypatch)


def _step(images: Tensor, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    module(images).sum().backward()
    optimizer.step()


def _after_a_step(
    seconds: FakeClock, module: nn.Module, optimizer: torch.optim.Optimizer, evaluate: Evaluate
) -> None:
    loader = DataLoader(dataset(800), batch_size=8)
    for made, (images, _) in enumerate(loader, start=1):
        _step(images, module, optimizer)
        if made % EVERY == 0:
            evaluate()


def _before_a_step(
    seconds: FakeClock, module: nn.Module, optimizer: torch.optim.Optimizer, evaluate: Evaluate
) -> None:
    """Its batch is there already, and another loader's come after it."""
    loader, other = (DataLoader(dataset(800), batch_size=size) for size in (8, 400))
    for made, (images, _) in enumerate(loader):
        if made % EVERY == 0:
            with torch.no_grad():
                for _ in other:
                    pass
            evaluate()
        _step(images, module, optimizer)


def _without_a_loader(
    seconds: FakeClock, module: nn.Module, optimizer: torch.optim.Optimizer, evaluate: Evaluate
) -> None:
    images, _ = dataset(8).tensors
    for made in range(1, 100):
        _step(images, module, optimizer)
        if made % EVERY == 0:
            evaluate()


def _late_batches(
    seconds: FakeClock, module: nn.Module, optimizer: torch.optim.Optimizer, _: Evaluate
) -> None:
    """Every fifth is late, and that is the input's."""
    made = itertools.count(1)

    def collate(samples: list[tuple[Tensor, ...]]) -> Tensor:
        if next(made) % EVERY == 0:
            seconds.advance(50)
        return torch.stack([images for images, _ in samples])

    for images in DataLoader(dataset(800), batch_size=8, collate_fn=collate):
        _step(images, module, optimizer)


def _made_by_a_function(
    seconds: FakeClock, module: nn.Module, optimizer: torch.optim.Optimizer, evaluate: Evaluate
) -> None:
    """Which takes its time for every batch, and is asked by an evaluation, too."""
    decorator = BatchFunctionDecorator(["train.py:1 get_batch"])
    decorator.install()

    @decorator
    def get_batch() -> Tensor:
        seconds.advance(7)
        return torch.randn(8, 8)

    for made in range(1, 100):
        _step(get_batch(), module, optimizer)
        if made % EVERY == 0:
            with torch.no_grad():
                get_batch()
            evaluate()


def _watched(training: Training, seconds: FakeClock, variant: Variant | None = None) -> RankSamples:
    """A forward takes a second."""

    def run() -> None:
        module = model()
        module.register_forward_hook(lambda *_: seconds.advance(1))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        training(seconds, module, optimizer, lambda: seconds.advance(50))

    found: RecordingObserver = instrumented(
        run, script_task(variant, steps=STEPS, warmup_steps=WARMUP)
    )
    assert found.samples is not None
    assert len(found.samples.host_gaps_ms) == WARMUP + STEPS
    assert found.samples.windows[0].first_step == WARMUP
    return found.samples


def _pauses(training: Training, seconds: FakeClock, variant: Variant | None = None) -> list[float]:
    """Of the steps after the warm-up, in seconds."""
    found = _watched(training, seconds, variant)
    return [ms / 1e3 for ms in found.host_gaps_ms[WARMUP:]]


@pytest.mark.parametrize(
    ("training", "usual", "pause"),
    [(_after_a_step, 0, 50), (_before_a_step, 0, 50), (_without_a_loader, 0, 50)],
)
def test_work_after_every_fifth_step_is_a_host_gap(
    training: Training, usual: float, pause: float, seconds: FakeClock
) -> None:
    """Where nobody is seen to ask for a batch, until the model is called."""
    found = _pauses(training, seconds)
    assert found == [usual if step % EVERY else pause for step in range(WARMUP, WARMUP + STEPS)]


def test_prefetched_batch_does_not_end_a_host_gap(
    seconds: FakeClock,
) -> None:
    """As nanoGPT has it: the next batch is asked for behind a forward on the one before."""

    def training(
        seconds: FakeClock, module: nn.Module, optimizer: torch.optim.Optimizer, evaluate: Evaluate
    ) -> None:
        loader = iter(DataLoader(dataset(800), batch_size=8))
        images, _ = next(loader)
        for made in range(90):
            if made % EVERY == 0:
                evaluate()
            outputs = module(images)
            images, _ = next(loader)
            outputs.sum().backward()
            optimizer.step()

    found = _pauses(training, seconds)
    assert found == [0 if step % EVERY else 50 for step in range(WARMUP, WARMUP + STEPS)]


def test_waiting_for_a_batch_is_not_a_host_gap(seconds: FakeClock) -> None:
    assert set(_pauses(_late_batches, seconds)) == {0}


@pytest.mark.parametrize(("input_", "usual"), [("real", 7), ("replayed", 0)])
def test_call_of_a_batch_function_ends_the_host_gap(
    input_: str, usual: float, seconds: FakeClock
) -> None:
    """From the end of the warm-up on, where its batches are left out at some time."""
    try:
        found = _pauses(_made_by_a_function, seconds, Variant(input=input_))
    finally:
        decorator = installed_decorator()
        assert decorator is not None
        decorator.uninstall()
    pauses = {step: found[step - WARMUP] for step in range(WARMUP + 1, WARMUP + STEPS)}
    assert pauses == {step: usual + (0 if step % EVERY else 57) for step in pauses}


def test_epoch_boundary_is_not_a_host_gap(seconds: FakeClock) -> None:
    def training(
        seconds: FakeClock, module: nn.Module, optimizer: torch.optim.Optimizer, evaluate: Evaluate
    ) -> None:
        loader = DataLoader(dataset(24), batch_size=8)
        for _ in range(100):
            for images, _ in loader:
                _step(images, module, optimizer)
            evaluate()

    found = _watched(training, seconds, Variant())
    assert set(found.host_gaps_ms[WARMUP:]) == {0}
    # What lies between takes 50 s: none ends any more.
    assert found.epoch_starts == (3, 6)


def test_evaluation_before_the_first_step_does_not_feed_training(seconds: FakeClock) -> None:
    """Its batches are the last before a step of the warm-up, and no gradients are made of them."""
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    training = lambda: _before_a_step(seconds, module, optimizer, lambda: None)  # noqa: E731
    found = instrumented(training, script_task(steps=STEPS, warmup_steps=WARMUP))
    assert found.samples is not None
    assert found.profile.global_batch_size == 8
    assert sum(window.samples for window in found.samples.windows) == 8 * STEPS
