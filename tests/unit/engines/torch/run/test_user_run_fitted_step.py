"""Memory "fit" on one device: what is repeated, what is restored, which errors are clear."""

from __future__ import annotations

import contextlib
import sys
from collections import UserDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import nfold
from nfold.core.errors import OutOfMemory, UsageError
from nfold.core.plan import Plan
from nfold.engines.plan_rules import first_broken_rule
from nfold.engines.sampling import BatchShare
from nfold.engines.torch.run import fitted_step
from nfold.engines.torch.run.batch_rows import RowSelector, merge_results
from nfold.engines.torch.run.captured_step import CapturedStep
from nfold.engines.torch.run.fitted_step import FitGuard, FittedStep, MicroBatchSearch
from nfold.engines.torch.run.prepared_module import prepared_forward
from nfold.engines.torch.step.cuda_graph import WARM_UP_CALLS
from nfold.engines.torch.torch_rules import script_rules


class Net(nn.Module):
    """Fails behind its batch norm if a batch has more than ``rows`` samples."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(
            nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1)
        )
        self.rows = rows

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        if len(x) > self.rows:
            raise torch.OutOfMemoryError("out of memory")
        return y


def _train(rows: int, **fields: Any) -> Net:
    torch.manual_seed(0)
    run, model = nfold.Run(device="cpu", **fields), Net(rows)
    optimizer = torch.optim.Adam(model.parameters())
    run.prepare(model, optimizer)

    @run.step
    def step(x: Tensor) -> Tensor:
        loss: Tensor = model(x).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    for x in run.loader(torch.randn(30, 2), batch_size=10):
        step(x)
    assert run.steps == 3
    return model


@pytest.mark.slow(parts=8)
def test_a_repeated_step_is_that_of_accumulation_to_the_last_bit() -> None:
    """Also its dropout, and the statistics and the counter of its batch norm."""
    found = _train(3, memory="fit").state_dict()
    expected = _train(3, accumulate=4).state_dict()
    assert found["layers.1.num_batches_tracked"] == 12
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_a_loop_without_a_decorated_step_is_refused() -> None:
    run = nfold.Run(device="cpu", memory="fit")
    run.prepare(nn.Linear(2, 1))
    with pytest.raises(UsageError, match=r"@run\.step.*accumulate=2"):
        next(iter(run.loader(torch.ones(4, 2), batch_size=2)))


def test_statistics_over_all_devices_are_refused() -> None:
    plan = Plan(device="cpu", memory="fit", batch_norm="synchronised")
    assert first_broken_rule(script_rules(plan, 1)) is None
    assert "accumulate=2 in place of memory" in str(first_broken_rule(script_rules(plan, 2)))


def test_what_waits_for_other_ranks_is_refused_in_a_step() -> None:
    run = nfold.Run(device="cpu", memory="fit")
    with pytest.raises(UsageError, match=r"run\.sum.*after the function"):
        run.step(lambda: run.sum(1))()
    assert run.sum(1) == 1


def test_a_smaller_size_is_compiled_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    run = nfold.Run(device="cpu", memory="fit", step="compiled")
    resets: list[int] = []
    sizes: list[int] = []
    monkeypatch.setattr(torch.compiler, "reset", lambda: resets.append(len(sizes)))

    @run.step
    def step(x: Tensor) -> None:
        sizes.append(len(x))
        if len(x) > 2:
            raise torch.OutOfMemoryError("out of memory")

    run.prepare(nn.Linear(2, 1))
    with pytest.warns(UserWarning, match="no optimizer is prepared"):
        step(next(iter(run.loader(torch.ones(4, 2), batch_size=4))))
    assert sizes == [4, 2, 2]
    assert set(resets) == {1}


@pytest.mark.slow(parts=8)
def test_a_model_stays_compiled_after_running_out_of_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "compile", lambda function: function)
    model = _train(3, memory="fit", step="compiled")
    assert prepared_forward(model).step == "compiled"


def test_batches_of_other_loaders_are_not_divided() -> None:
    run, model = nfold.Run(device="cpu", memory="fit"), Net(1)
    run.prepare(model)
    with pytest.raises(OutOfMemory, match=r"batches of run\.loader only"):
        run.step(model)(torch.ones(3, 2))


def test_other_errors_are_not_repeated() -> None:
    run, calls = nfold.Run(device="cpu", memory="fit"), []

    @run.step
    def step() -> None:
        calls.append(1)
        raise RuntimeError("a mistake")

    with pytest.raises(RuntimeError, match="a mistake"):
        step()
    assert len(calls) == 1


def test_an_update_is_not_repeated() -> None:
    run, model = nfold.Run(device="cpu", memory="fit"), nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.prepare(model, optimizer)
    fails = iter([False, True])

    def fail(*_: Any) -> None:
        if model.weight.grad is not None and next(fails):
            raise torch.OutOfMemoryError("out of memory")

    optimizer.register_step_post_hook(fail)

    @run.step
    def step(x: Tensor) -> None:
        torch.autograd.backward(model(x).mean())
        optimizer.step()

    loader = iter(run.loader(torch.ones(4, 2), batch_size=2))
    step(next(loader))
    with pytest.raises(OutOfMemory, match=r"in step after its gradients were complete"):
        step(next(loader))


@pytest.mark.parametrize("functions", [1, 2])
def test_each_optimizer_of_a_gan_needs_its_own_function(functions: int) -> None:
    """In parts, the second backward of one function would see the update in the last part only."""
    run, models = nfold.Run(device="cpu", memory="fit", accumulate=2), [Net(9), Net(9)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    run.prepare(*models, *optimizers)

    def update(x: Tensor, number: int) -> None:
        optimizers[number].zero_grad()
        torch.autograd.backward(models[number](x).square().mean())
        optimizers[number].step()

    @run.step
    def both(x: Tensor) -> None:
        update(x, 0)
        update(x, 1)

    each = run.step(update)
    batch = next(iter(run.loader(torch.ones(4, 2), batch_size=4)))
    if functions == 2:
        each(batch, 0)
        each(batch, 1)
        return
    with pytest.raises(UsageError, match=r"both has a backward after an update.*each optimizer"):
        both(batch)


@pytest.mark.slow(parts=8)
def test_no_memory_for_one_sample_names_what_helps() -> None:
    with pytest.raises(OutOfMemory, match=r"one sample per device.*sharded.*checkpointing"):
        _train(0, memory="fit")


def test_the_advice_follows_the_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    fitted_step.advise_on_out_of_memory.__wrapped__()
    error = torch.OutOfMemoryError("tried to allocate 2 GiB")
    sys.excepthook(type(error), error, None)
    assert capsys.readouterr().err.splitlines()[-1] == fitted_step.OUT_OF_MEMORY_ADVICE


class Graph:
    def __init__(self, call: Callable[[], Any], result: Any) -> None:
        self._call, self._result = call, result

    def replay(self) -> None:
        self._result.copy_(self._call())

    def reset(self) -> None:
        pass


class Recorder:
    """Records calls without a GPU."""

    def __init__(self) -> None:
        self.recordings = 0

    def run_on_capture_stream(self, call: Callable[[], Any]) -> Any:
        return call()

    def pool_bytes(self) -> int:
        return 0

    def record(self, call: Callable[[], Any]) -> tuple[Graph, Any]:
        self.recordings += 1
        result = call().clone()
        return Graph(call, result), result


@pytest.mark.parametrize("call", [WARM_UP_CALLS, WARM_UP_CALLS + 1], ids=["recording", "replay"])
def test_a_graph_is_not_begun_when_another_rank_has_no_memory(call: int) -> None:
    run = nfold.Run(device="cpu", memory="fit", step="captured")
    guard, recorder = run._bookkeeping.guard, Recorder()
    assert isinstance(guard, FitGuard)
    shapes: list[int] = []

    def function(x: Tensor) -> Tensor:
        shapes.append(len(x))
        return x.mean()

    captured = CapturedStep(function, run._bookkeeping, recorder)
    step = FittedStep(captured, run._bookkeeping, run.plan)
    run.loader(torch.zeros(4), batch_size=4)
    run._bookkeeping.current_share.set(BatchShare(count=4, global_count=4))
    batch = torch.arange(4.0)
    for _ in range(call):
        step(batch)
    before = recorder.recordings, len(shapes)
    answers = iter([[1.0, 0.0]])
    guard.largest = lambda values: next(answers, list(values))  # type: ignore[method-assign]
    assert step(batch).item() == pytest.approx(1.5)
    assert (recorder.recordings, shapes[before[1] :]) == (before[0], [2, 2])
    for _ in range(WARM_UP_CALLS):
        assert step(batch).item() == pytest.approx(1.5)
    assert recorder.recordings == before[0] + 2  # the first part and the last


def test_a_script_that_catches_all_errors_does_not_go_on_alone() -> None:
    run, model, calls = nfold.Run(device="cpu", memory="fit"), nn.Linear(2, 1), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.prepare(model, optimizer)
    guard = run._bookkeeping.guard
    assert isinstance(guard, FitGuard)
    answers = iter([[1.0, 0.0]])
    guard.largest = lambda values: next(answers, list(values))  # type: ignore[method-assign]

    @run.step
    def step(x: Tensor) -> None:
        calls.append(len(x))
        torch.autograd.backward(model(x).mean())
        with contextlib.suppress(Exception):
            optimizer.step()

    step(next(iter(run.loader(torch.ones(2, 2), batch_size=2))))
    assert calls == [2, 1, 1]
    assert run.steps == 1


def _search(times: dict[int, float], first: int = 1, limit: int = 64) -> MicroBatchSearch:
    """A search whose steps take the times; numbers without one do not fit."""

    def agree(values: Sequence[float]) -> list[float]:
        return [max(value, 0.004) for value in values]  # another rank's times

    search = MicroBatchSearch(first, agree)
    for _ in range(100):
        if search.is_done:
            break
        if seconds := times.get(search.micro_batches):
            search.on_step(seconds, 1, limit)
        else:
            search.on_out_of_memory(limit)
    return search


def test_the_fastest_number_that_fits_is_chosen() -> None:
    search = _search({4: 0.02, 8: 0.01, 16: 0.03})
    assert search.micro_batches == 8
    assert search.samples_per_s == pytest.approx({4: 50, 8: 100, 16: 1 / 0.03})


def test_more_micro_batches_than_necessary_must_be_faster_beyond_noise() -> None:
    assert _search({1: 0.0200, 2: 0.0198, 4: 0.0199}).micro_batches == 1


def test_the_slowest_rank_decides() -> None:
    assert _search({1: 0.004, 2: 0.003, 4: 0.002}).micro_batches == 1


def test_no_part_is_smaller_than_a_sample() -> None:
    assert set(_search({1: 0.02, 2: 0.01}, limit=3).samples_per_s) == {1, 2}
    assert _search({3: 0.01}, limit=3).micro_batches == 3


def test_the_search_begins_again_from_what_fits_later() -> None:
    search = MicroBatchSearch(1, list)
    search.on_step(0.1, 1, 64)
    search.on_out_of_memory(64)
    numbers = []
    while not search.is_done:
        numbers.append(search.micro_batches)
        search.on_step(0.1, 1, 64)
    assert numbers == [4, 8, 16] * 4


def test_the_first_step_of_each_number_is_not_counted() -> None:
    search = MicroBatchSearch(1, list)
    while not search.is_done:
        first = not search._seconds.get(search.micro_batches)
        search.on_step(9.0 if first else 0.1 * search.micro_batches, 1, 64)
    assert search.samples_per_s == pytest.approx({1: 10, 2: 5, 4: 2.5})


class Pair(NamedTuple):
    first: Any
    second: Any


def test_rows_are_selected_in_any_structure() -> None:
    x, keep = torch.arange(6).view(3, 2), torch.ones(2)
    batch = UserDict({"x": x, "names": ["a", "b", "c"], "keep": keep, "n": np.arange(3)})
    targets = tuple({"boxes": torch.ones(n, 4)} for n in (3, 1, 2))
    select = RowSelector("step")
    args, kwargs = select((batch, (x, 5), targets, Pair(x, 5)), {"flag": True}, 3, range(1, 3))
    assert torch.equal(args[0]["x"], x[1:])
    assert args[0]["names"] == ["b", "c"]
    assert args[0]["keep"] is keep
    assert args[0]["n"].tolist() == [1, 2]
    assert torch.equal(args[1][0], x[1:])
    assert isinstance(args[3], Pair)
    assert torch.equal(args[3].first, x[1:])
    assert [len(target["boxes"]) for target in args[2]] == [1, 2]
    assert (args[1][1], kwargs) == (5, {"flag": True})


def test_arguments_without_rows_are_refused() -> None:
    with pytest.raises(UsageError, match=r"no argument of step has 3 rows.*accumulate=2"):
        RowSelector("step")((torch.ones(2, 3),), {}, 3, range(1))
    with pytest.raises(UsageError, match="PackedSequence"):
        RowSelector("step")((nn.utils.rnn.pack_sequence([torch.ones(2)]),), {}, 1, range(1))


@pytest.mark.parametrize("samples", [True, False])
def test_a_list_of_batches_is_told_from_a_list_of_samples_by_earlier_calls(samples: bool) -> None:
    square = [torch.ones(2, 2), torch.zeros(2, 2)]
    select = RowSelector("step")
    with pytest.raises(UsageError, match="separate arguments"):
        select((square,), {}, 2, range(1))
    assert [len(item) for item in select(([square[0], torch.ones(2)],), {}, 2, range(1))[0][0]] == [
        1,
        1,
    ]
    earlier = [torch.ones(2, 2)] * 3 if samples else [torch.ones(3, 2)] * 2
    select((earlier,), {}, 3, range(1))
    (found,), _ = select((square,), {}, 2, range(1))
    assert [len(item) for item in found] == ([2] if samples else [1, 1])


def test_results_of_parts_become_one() -> None:
    parts: list[Any] = [
        (torch.tensor(1.0), {"right": 3, "loss": 1.0}, torch.zeros(2, 4), "a"),
        (torch.tensor(4.0), {"right": torch.tensor(1), "loss": 4.0}, torch.ones(1, 4), "b"),
    ]
    parts[0][1]["right"] = torch.tensor(3)
    mean, values, rows, last = merge_results(parts, [2, 1])
    assert mean.item() == values["loss"] == pytest.approx(2)
    assert values["right"].item() == 4
    assert rows.shape == (3, 4)
    assert last == "b"
    assert merge_results([None, None], [1, 1]) is None
