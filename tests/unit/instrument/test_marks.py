"""``nfold.mark_step`` and ``nfold.batches``: outside nfold, and in an instrumented rank."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

import nfold
from instrumented import CLASSES, FEATURES, dataset, instrumented, loop, model, script_task
from nfold.core.errors import Unsupported
from nfold.core.variant import Variant
from nfold.engines.torch.input.batch_source import REPLAYED_BATCHES
from nfold.instrument import optimizer_steps

REPLAYED = Variant(input="replayed")
Batch = tuple[Tensor, Tensor]


def test_marks_do_nothing_outside_nfold() -> None:
    numbers = iter(range(3))
    assert nfold.batches(numbers) is numbers
    assert list(nfold.batches([1, 2])) == [1, 2]
    nfold.mark_step()


def _update_by_hand(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            assert parameter.grad is not None
            parameter.sub_(parameter.grad, alpha=0.1)


def _by_hand(*, checkpointed: bool = False, marks: bool = True, accumulate: int = 1) -> None:
    module = nn.Sequential(nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES))
    batches = itertools.chain.from_iterable([DataLoader(dataset(), 8)] * 10)
    for number, (samples, labels) in enumerate(batches, start=1):
        hidden = module[0](samples)
        run = torch.utils.checkpoint.checkpoint
        scores = run(module[1], hidden, use_reentrant=True) if checkpointed else module[1](hidden)
        nn.functional.cross_entropy(scores, labels).backward()  # type: ignore[no-untyped-call]
        if number % accumulate == 0:
            _update_by_hand(module)
            module.zero_grad()
            if marks:
                nfold.mark_step()


@pytest.mark.parametrize(("checkpointed", "accumulate"), [(False, 1), (True, 1), (False, 4)])
def test_marks_end_the_steps_of_an_update_by_hand(*, checkpointed: bool, accumulate: int) -> None:
    found = instrumented(
        lambda: _by_hand(checkpointed=checkpointed, accumulate=accumulate), script_task()
    )
    assert found.samples is not None
    assert len(found.samples.step_ms) == 10
    assert sum(window.samples for window in found.samples.windows) == 80 * accumulate
    assert found.profile.has_no_optimizer
    assert found.profile.parameter_count == FEATURES * 8 + 8 + 8 * CLASSES + CLASSES
    assert found.profile.accumulation == accumulate


@pytest.mark.parametrize("announced", [True, False])
def test_marks_end_the_steps_of_torch_autograd_grad(*, announced: bool) -> None:
    def training() -> None:
        weight = torch.zeros(FEATURES, CLASSES, requires_grad=True)
        if announced:
            nfold.mark_step()
        for samples, labels in itertools.chain.from_iterable([DataLoader(dataset(), 8)] * 10):
            loss = nn.functional.cross_entropy(samples @ weight, labels)
            (gradient,) = torch.autograd.grad(loss, weight)
            with torch.no_grad():
                weight.sub_(gradient)
            nfold.mark_step()

    grad = torch.autograd.grad
    found = instrumented(training, script_task())
    assert torch.autograd.grad is grad
    assert found.samples is not None
    assert len(found.samples.step_ms) == 10
    assert found.profile.parameter_count == FEATURES * CLASSES


def test_update_by_hand_without_marks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_steps, "STEP_SEARCH_S", 0.0)
    with pytest.raises(Unsupported, match=r"nfold\.mark_step\(\) after .* follows .*_marks.py:\d+"):
        instrumented(lambda: _by_hand(marks=False), script_task())


def test_late_optimizer_is_waited_for() -> None:
    """Backwards before it, as of a search for a learning rate, are no reason to end."""

    def training() -> None:
        module = model()
        for samples, _ in DataLoader(dataset(), 8):
            module(samples).sum().backward()
        loop(DataLoader(dataset(), 8), module, torch.optim.SGD(module.parameters(), lr=0.1))

    found = instrumented(training, script_task())
    assert found.samples is not None
    assert len(found.samples.step_ms) == 10


def test_marks_without_training_are_refused() -> None:
    def training() -> None:
        while True:
            nfold.mark_step()

    with pytest.raises(Unsupported, match="the trained parameters are not known"):
        instrumented(training, script_task())


def _line_search() -> None:
    module = model()
    optimizer = torch.optim.LBFGS(module.parameters(), max_iter=3)
    samples, labels = dataset().tensors
    for _ in range(100):

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(module(samples), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        optimizer.step(closure)  # type: ignore[no-untyped-call]
        nfold.mark_step()


def test_mark_after_a_closure_counts_once() -> None:
    found = instrumented(_line_search, script_task())
    assert found.samples is not None
    assert len(found.samples.step_ms) == 10
    assert found.profile.optimizers == ("LBFGS",)


def _averaging(every: int, *, announced: bool) -> Callable[[], None]:
    """Return a training whose ranks average their parameters after ``every`` steps."""

    def training() -> None:
        module = model()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        if announced:
            nfold.mark_step()
        for step, (samples, labels) in enumerate(DataLoader(dataset(1280), batch_size=8)):
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(samples), labels).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if step % every == every - 1:
                for parameter in module.parameters():
                    dist.all_reduce(parameter.data)
                nfold.mark_step()

    return training


@pytest.mark.usefixtures("group")
def test_several_optimizer_steps_make_one_marked_step() -> None:
    found = instrumented(_averaging(3, announced=True), script_task())
    assert found.samples is not None
    assert len(found.samples.step_ms) == 10
    assert (found.profile.accumulation, found.profile.samples_per_step) == (3, 24)
    (sent,) = found.profile.collectives
    assert (sent.name, sent.per_step) == ("all_reduce", len(list(model().parameters())))


@pytest.mark.usefixtures("group")
def test_late_first_mark_is_refused() -> None:
    with pytest.raises(Unsupported, match=r"after 3 optimizer steps.*once before the training"):
        instrumented(_averaging(3, announced=False), script_task())


def _generated(passed: list[int], count: int = 10**6) -> Iterator[Batch]:
    """Yield batches that no function returns."""
    for number in range(count):
        passed.append(number)
        yield torch.randn(6, FEATURES), torch.randint(0, CLASSES, (6,))


def _train_on(batches: Any, epochs: int = 1) -> Callable[[], None]:
    def training() -> None:
        module = model()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(epochs):
            loop(nfold.batches(batches()), module, optimizer, epochs=1)

    return training


def test_marked_batches_are_replayed() -> None:
    passed: list[int] = []
    real = instrumented(_train_on(lambda: _generated(passed)), script_task())
    assert real.samples is not None
    assert len(real.samples.step_ms) == 10
    assert sum(window.samples for window in real.samples.windows) == 60
    assert real.profile.loader is None
    function = real.profile.batch_function
    assert function is not None
    assert function.call_text == "nfold.batches()"
    assert "test_marks.py:" in function.defined_at
    passed.clear()
    found = instrumented(
        _train_on(lambda: _generated(passed)), script_task(REPLAYED, steps=100, warmup_steps=6)
    )
    assert found.samples is not None
    assert len(found.samples.step_ms) == 100
    assert len(passed) <= 6 + REPLAYED_BATCHES


def test_marked_batches_are_interleaved() -> None:
    passed: list[int] = []
    task = script_task(warmup_steps=6, steps=40)
    found = instrumented(
        _train_on(lambda: _generated(passed)),
        dataclasses.replace(task, interleaved_variants=(Variant(), REPLAYED)),
    ).samples
    assert found is not None
    assert set(found.slots) == {0, 1}
    assert len(passed) < len(found.step_ms)


@pytest.mark.parametrize("batches", [lambda: _generated([], 5), lambda: [*_generated([], 5)]])
def test_marked_passes_are_epochs(batches: Any) -> None:
    """Of an iterator that is new in every epoch, and of a list."""
    found = instrumented(_train_on(batches, epochs=10), script_task(steps=20))
    assert found.samples is not None
    assert found.samples.epoch_starts == (5, 10, 15, 20)
    assert any(window.epoch_gap is not None for window in found.samples.windows)


def test_iterator_can_be_advanced_by_next() -> None:
    def training() -> None:
        module = model()
        batches: Any = nfold.batches(_generated([]))
        loop((next(batches) for _ in range(100)), module, torch.optim.SGD(module.parameters(), 0.1))

    found = instrumented(training, script_task())
    assert found.samples is not None
    assert sum(window.samples for window in found.samples.windows) == 60


def _cycle(loader: Any) -> Iterator[Batch]:
    while True:
        yield from loader


@pytest.mark.parametrize("variant", [None, REPLAYED])
def test_loader_inside_marked_batches_is_a_part_of_them(variant: Variant | None) -> None:
    loader: Any = DataLoader(dataset(), batch_size=8)
    found = instrumented(_train_on(lambda: _cycle(loader)), script_task(variant, steps=30))
    assert found.samples is not None
    assert sum(window.samples for window in found.samples.windows) == 240
    assert found.profile.loader is None
    assert found.profile.companion_loaders == ()
    assert found.samples.epoch_starts == ()


def test_marked_loader_is_a_loader() -> None:
    loader: Any = DataLoader(dataset(), batch_size=8)
    found = instrumented(_train_on(lambda: loader, epochs=9), script_task())
    assert found.profile.loader is not None
    assert found.profile.batch_function is None
