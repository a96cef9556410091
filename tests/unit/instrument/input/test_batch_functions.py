"""A function of the script's own that makes its batches is found, and stood in for."""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from instrumented import CLASSES, FEATURES, RecordingObserver, instrumented, model, script_task
from nfold.core.errors import Unsupported
from nfold.core.source_location import is_user_code
from nfold.core.variant import Variant
from nfold.engines.torch.input.batch_source import REPLAYED_BATCHES
from nfold.instrument.hooks.patches import BatchFunctionDecorator, function_key

CALLS: list[str] = []
REPLAYED = Variant(input="replayed")
Batch = tuple[Tensor, Tensor]


@pytest.fixture(autouse=True)
def _fresh() -> None:
    CALLS.clear()
    assert is_user_code(__file__)


def _key(function: Any) -> str:
    code = function.__code__
    return function_key(code.co_filename, code.co_firstlineno, code.co_name)


def get_batch(split: str = "train", *, size: int = 6) -> Batch:
    CALLS.append(split)
    return torch.randn(size, FEATURES), torch.randint(0, CLASSES, (size,))


class Lite:
    """Its batches are of another type than the model wants."""

    def next_batch(self) -> Batch:
        CALLS.append("lite")
        whole = torch.randn(7, FEATURES, dtype=torch.float64)
        return whole, torch.randint(0, CLASSES, (6,))


@contextmanager
def _decorated(*functions: Any) -> Iterator[BatchFunctionDecorator]:
    """Define functions of this module again, as in a run that replays batches."""
    decorator = BatchFunctionDecorator([_key(function) for function in functions])
    decorator.install()
    try:
        with pytest.MonkeyPatch.context() as patch:
            for function in functions:
                patch.setitem(globals(), function.__name__, decorator(function))
            yield decorator
    finally:
        decorator.uninstall()


def _stepped(module: nn.Module, optimizer: Any, *batches: Batch) -> None:
    optimizer.zero_grad()
    for samples, labels in batches:
        nn.functional.cross_entropy(module(samples), labels).backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def _training(step: Callable[[nn.Module, Any], None], steps: int = 150) -> Callable[[], None]:
    def training() -> None:
        module = model()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(steps):
            step(module, optimizer)

    return training


def _found(
    step: Callable[[nn.Module, Any], None], left_out: Variant | None = None
) -> RecordingObserver:
    """Of six steps of a warm-up the last is measured as those after it: a hundred."""
    found = instrumented(_training(step), script_task(left_out, warmup_steps=6, steps=100))
    assert found.samples is not None
    assert sys.getprofile() is None
    return found


def test_batch_function_is_found_with_its_calls() -> None:
    def step(module: nn.Module, optimizer: Any) -> None:
        _stepped(module, optimizer, get_batch(), get_batch(size=6))

    seen = _found(step).profile
    assert seen.batch_function is not None
    assert seen.batch_function.names == ("get_batch",)
    line = get_batch.__code__.co_firstlineno
    assert seen.batch_function.defined_at.endswith(f"test_batch_functions.py:{line}")
    assert not seen.batch_function.on_device
    assert (seen.accumulation, seen.samples_per_step) == (2, 12)
    assert len(CALLS) == 2 * 106


def test_batch_function_is_replayed() -> None:
    def step(module: nn.Module, optimizer: Any) -> None:
        _stepped(module, optimizer, get_batch())

    with _decorated(get_batch):
        found = _found(step, REPLAYED)
    assert found.samples is not None
    assert sum(window.steps for window in found.samples.windows) == 100
    assert len(CALLS) <= 6 + REPLAYED_BATCHES


def test_evaluation_and_splits_have_their_batches() -> None:
    kept: dict[str, list[Tensor]] = {"train": [], "hard": [], "evaluated": []}

    def step(module: nn.Module, optimizer: Any) -> None:
        train, hard = get_batch("train"), get_batch("hard")
        with torch.no_grad():
            evaluated = get_batch("train")
        for name, batch in (("train", train), ("hard", hard), ("evaluated", evaluated)):
            kept[name].append(batch[0])
        _stepped(module, optimizer, train, hard)

    with _decorated(get_batch):
        _found(step, REPLAYED)
    sums = {name: {float(one.sum()) for one in found[-60:]} for name, found in kept.items()}
    assert len(sums["evaluated"]) == 60
    assert len(sums["train"]) == len(sums["hard"]) == REPLAYED_BATCHES
    assert not sums["train"] & sums["hard"]


def test_method_with_copied_and_sliced_tensors_is_found() -> None:
    lite = Lite()

    def step(module: nn.Module, optimizer: Any) -> None:
        samples, labels = lite.next_batch()
        _stepped(module, optimizer, (samples.to(torch.float64).float()[:6], labels))

    maker = _found(step).profile.batch_function
    assert maker is not None
    assert maker.names == ("next_batch",)


def test_nested_function_is_replaced() -> None:
    scale, args = 2.0, ("own",)
    decorator = BatchFunctionDecorator(["train.py:1 own"])
    decorator.install()

    @decorator
    def own() -> Tensor:
        CALLS.extend(args)
        return scale * torch.randn(6, FEATURES)

    def step(module: nn.Module, optimizer: Any) -> None:
        _stepped(module, optimizer, (own(), torch.zeros(6, dtype=torch.long)))

    try:
        maker = _found(step, REPLAYED).profile.batch_function
    finally:
        decorator.uninstall()
    assert maker is not None
    assert maker.names == ("own",)
    assert len(CALLS) <= 6 + REPLAYED_BATCHES
    assert own().shape == (6, FEATURES)


def repackage(state: Any) -> Any:
    """In the manner of a language model: the state goes on, its gradients do not."""
    return state.detach() if isinstance(state, Tensor) else tuple(repackage(one) for one in state)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = model()

    def forward(self, samples: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Any]:
        answers: Tensor = self.inner(samples + sum(state))
        return answers, (state[0] + answers.mean(), state[1])


def test_model_state_is_no_batch() -> None:
    """The first state has no gradient yet."""

    def training() -> None:
        module, state = Recurrent(), (torch.zeros(6, FEATURES), torch.zeros(6, FEATURES))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(150):
            samples, labels = get_batch()
            state = repackage(state)
            answers, state = module(samples, state)
            optimizer.zero_grad()
            nn.functional.cross_entropy(answers, labels).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    maker = instrumented(training, script_task()).profile.batch_function
    assert maker is not None
    assert maker.names == ("get_batch",)


def augment(samples: Tensor) -> Tensor:
    CALLS.append("augment")
    return samples + torch.randn_like(samples)


def test_chained_batch_functions_are_replaced() -> None:
    def step(module: nn.Module, optimizer: Any) -> None:
        samples, labels = get_batch()
        samples = augment(samples)
        _stepped(module, optimizer, (samples, labels))

    with _decorated(get_batch, augment):
        maker = _found(step, REPLAYED).profile.batch_function
    assert maker is not None
    assert maker.call_text == "get_batch() and augment()"
    assert maker.defined_at.endswith(f":{get_batch.__code__.co_firstlineno}")
    assert Counter(CALLS)["train"] == Counter(CALLS)["augment"]
    assert len(CALLS) <= 2 * (6 + REPLAYED_BATCHES)


class Scaled(nn.Module):
    def forward(self, samples: Tensor) -> Tensor:
        CALLS.append("module")
        return 2 * samples


def computed(module: nn.Module, samples: Tensor) -> Tensor:
    CALLS.append("computed")
    with torch.no_grad():
        found: Tensor = module(samples)
    return found[:, :1] + samples


def test_function_that_gets_a_module_is_no_input() -> None:
    scaled, other = Scaled(), model()

    def step(module: nn.Module, optimizer: Any) -> None:
        samples, labels = get_batch()
        _stepped(module, optimizer, (computed(other, scaled(samples)), labels))

    assert _found(step).profile.batch_function is None
    assert Counter(CALLS)["module"] == Counter(CALLS)["computed"] == 106


def test_batch_function_is_interleaved() -> None:
    steps = []

    def step(module: nn.Module, optimizer: Any) -> None:
        steps.append(len(CALLS))
        _stepped(module, optimizer, get_batch())

    task = script_task(warmup_steps=6, steps=40)
    turns = (Variant(), REPLAYED)
    with _decorated(get_batch):
        found = instrumented(
            _training(step), dataclasses.replace(task, interleaved_variants=turns)
        ).samples
    assert found is not None
    assert set(found.slots) == {0, 1}
    # Once its batches are kept, it is called in the other turns only.
    assert len(CALLS) - REPLAYED_BATCHES <= len(steps) - len(found.step_ms) / 2


def generated(split: str = "train", count: int = 10**9) -> Iterator[Batch]:
    made = None
    for _ in range(count):
        made = get_batch(split)
        yield made


def _asking(running: Iterator[Batch]) -> Callable[[nn.Module, Any], None]:
    return lambda module, optimizer: _stepped(module, optimizer, next(running), next(running))


def test_generator_is_found_with_its_key() -> None:
    seen = _found(_asking(generated())).profile
    assert seen.batch_function is not None
    assert seen.batch_function.names == ("generated",)
    (name,) = seen.batch_function.function_keys
    line = generated.__code__.co_firstlineno
    assert name.endswith(f"test_batch_functions.py:{line} generated")
    assert (seen.accumulation, seen.samples_per_step) == (2, 12)


def test_decorated_generator_is_replayed() -> None:
    with _decorated(generated):
        running = generated()
        found = _found(_asking(running), REPLAYED)
    assert found.samples is not None
    assert found.profile.batch_function is not None
    # Of 6 steps of a warm-up the last has first batches already.
    assert len(CALLS) == 2 * 5 + REPLAYED_BATCHES
    assert torch.is_tensor(next(running)[0])
    assert len(CALLS) == 2 * 5 + REPLAYED_BATCHES + 1


def test_undecorated_function_cannot_be_replayed() -> None:
    def step(module: nn.Module, optimizer: Any) -> None:
        _stepped(module, optimizer, get_batch())

    for made in (step, _asking(generated())):
        with pytest.raises(
            Unsupported, match=r"cannot be replayed; next: nfold\.batches.*_functions\.py:\d+"
        ):
            _found(made, REPLAYED)


def test_exhausted_generator_ends() -> None:
    # Nothing is left after the steps in which it is not replayed.
    with _decorated(generated), pytest.raises(StopIteration):
        _found(_asking(generated("train", 10)), REPLAYED)


def test_async_functions_are_no_batch_functions() -> None:
    """Batches that are made in the loop; parts of two functions."""
    lite = Lite()

    def inline(module: nn.Module, optimizer: Any) -> None:
        _stepped(module, optimizer, (torch.randn(6, FEATURES), torch.zeros(6).long()))

    def both(module: nn.Module, optimizer: Any) -> None:
        other = lite.next_batch()[0].float()[:6]
        _stepped(module, optimizer, get_batch(), (other, torch.zeros(6).long()))

    for step in (inline, both):
        assert _found(step).profile.batch_function is None


def test_comprehension_is_part_of_its_function() -> None:
    """Nobody could put anything in its place: it is made anew whenever its line is run."""

    def both(module: nn.Module, optimizer: Any) -> None:
        drawn = (torch.randn(6, FEATURES), torch.randint(0, CLASSES, (6,)))
        samples, labels = [one.clone() for one in drawn]
        _stepped(module, optimizer, (samples, labels))

    assert _found(both).profile.batch_function is None


def test_generator_expression_passes_batches_on() -> None:
    """``x, y = (one.to(device) for one in get_batch())``: the function is called before it."""

    def handed_on(module: nn.Module, optimizer: Any) -> None:
        samples, labels = (one.contiguous() for one in get_batch())
        _stepped(module, optimizer, (samples, labels))

    maker = _found(handed_on).profile.batch_function
    assert maker is not None
    assert maker.names == ("get_batch",)


def test_lambda_is_no_batch_function() -> None:
    """It cannot be decorated: ``nfold.batches`` can mark its batches."""
    made: Callable[[], Batch] = lambda: (torch.randn(6, FEATURES), torch.zeros(6).long())  # noqa: E731

    def step(module: nn.Module, optimizer: Any) -> None:
        _stepped(module, optimizer, made())

    assert _found(step).profile.batch_function is None
