"""A user's step as CUDA graphs, with a recorder that needs no GPU."""

from __future__ import annotations

import warnings
from collections import UserDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nfold.engines.base import Observer
from nfold.engines.sampling import BatchShare
from nfold.engines.torch.batch import CurrentShare
from nfold.engines.torch.checkpoint import TrainingState
from nfold.engines.torch.run.captured_step import CapturedStep
from nfold.engines.torch.run.state import RunBookkeeping
from nfold.engines.torch.step.cuda_graph import MAX_CONSTANTS, WARM_UP_CALLS, CaptureFailed

CPU = torch.device("cpu")


class Graph:
    """Computes anew, as a graph's kernels would, without the Python beside them."""

    def __init__(self, call: Callable[[], Any], result: Any) -> None:
        self._call, self._result = call, result

    def replay(self) -> None:
        Notes.replaying = True
        self._result.copy_(self._call())
        Notes.replaying = False

    def reset(self) -> None:
        pass


class Notes:
    """A recorder whose recordings change nothing: tensors are put back after them."""

    replaying = False

    def __init__(self, kept: list[Tensor], *, refuses: Exception | None = None) -> None:
        self._kept, self._refuses = kept, refuses

    def run_on_capture_stream(self, call: Callable[[], Any]) -> Any:
        return call()

    def record(self, call: Callable[[], Any]) -> tuple[Graph, Any]:
        before = [tensor.detach().clone() for tensor in self._kept]
        try:
            result = call().clone()
            if self._refuses is not None:
                raise self._refuses
        except Exception as error:
            raise CaptureFailed from error
        finally:
            for tensor, value in zip(self._kept, before, strict=True):
                tensor.data.copy_(value)
        return Graph(call, result), result


class Training:
    """A weight, an optimizer that counts its steps in books, a schedule, a current share."""

    def __init__(self, refuses: Exception | None = None) -> None:
        self.weight = nn.Parameter(torch.ones(2))
        self.rate = torch.tensor(0.5)
        self.optimizer = torch.optim.SGD([self.weight], lr=self.rate)
        self.prepared = TrainingState(optimizers=[self.optimizer])
        self.current_share = CurrentShare(1)
        self.bookkeeping = RunBookkeeping(self.prepared, self.current_share, Observer(), CPU)
        self.calls = 0
        self.scheduled = 0
        recorder = Notes([self.weight, self.rate], refuses=refuses)
        self.step = CapturedStep(self.one, self.bookkeeping, recorder)

    def one(self, values: Tensor, scale: float = 1.0) -> Tensor:
        loss = (self.weight * values).sum() * scale
        with torch.no_grad():
            self.weight.sub_(self.rate * scale * values)
        if not Notes.replaying:
            self.calls += 1
            self.bookkeeping.on_optimizer_step(self.optimizer)
            self.bookkeeping.apply_or_defer(self._schedule)
        return loss.detach()

    def _schedule(self) -> None:
        self.scheduled += 1


def _times(count: int, step: Callable[[Tensor], Any]) -> None:
    for _ in range(count):
        step(torch.ones(2))


def test_every_call_steps_once_and_counts_once() -> None:
    training = Training()
    for call in range(8):
        expected = float(training.weight.detach().sum())
        assert float(training.step(torch.ones(2))) == expected
        assert training.prepared.steps == training.scheduled == call + 1
    assert training.calls == WARM_UP_CALLS + 1
    assert torch.equal(training.weight.detach(), torch.full((2,), 1 - 8 * 0.5))


def test_arguments_of_other_values_and_shares_have_graphs_of_their_own() -> None:
    training = Training()
    for scale in (1.0, 2.0):
        for _ in range(WARM_UP_CALLS + 2):
            training.step(torch.ones(2), scale=scale)
    assert training.calls == 2 * (WARM_UP_CALLS + 1)
    training.current_share.set(BatchShare(count=1, global_count=3))
    training.step(torch.ones(2))
    assert training.calls == 2 * (WARM_UP_CALLS + 1) + 1


def test_tensors_in_any_dictionary_are_inputs_of_one_graph() -> None:
    training = Training()
    one: Any = lambda batch: training.one(batch["values"])  # noqa: E731
    training.step = CapturedStep(one, training.bookkeeping, Notes([training.weight, training.rate]))
    for call in range(6):
        expected = float(training.weight.detach().sum())
        training.step(UserDict(values=torch.ones(2)))
        assert float(training.weight.detach().sum()) == expected - 2 * 0.5
        assert training.calls == min(call + 1, WARM_UP_CALLS + 1)


def test_a_parameter_that_is_unfrozen_within_an_epoch_is_recorded_again() -> None:
    training = Training()
    training.bookkeeping.parameters.append(training.weight)
    training.weight.requires_grad_(False)
    _times(WARM_UP_CALLS + 2, training.step)
    training.weight.requires_grad_(True)
    training.step(torch.ones(2))
    assert training.calls == WARM_UP_CALLS + 2


def test_a_setting_that_a_graph_holds_fast_is_recorded_again() -> None:
    training = Training()
    for _ in range(WARM_UP_CALLS + 2):
        training.step(torch.ones(2))
    training.optimizer.param_groups[0]["momentum"] = 0.5
    training.step(torch.ones(2))
    assert training.calls == WARM_UP_CALLS + 2


def test_what_cannot_be_captured_runs_and_reports_once_which_line() -> None:
    training = Training(refuses=RuntimeError("operation not permitted\nmore"))
    with pytest.warns(UserWarning, match=r"one runs eagerly: .*:\d+ .*operation not permitted\)"):
        _times(WARM_UP_CALLS + 1, training.step)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        training.step(torch.ones(2))
    assert training.prepared.steps == WARM_UP_CALLS + 2
    assert torch.equal(training.weight.detach(), torch.full((2,), 1 - (WARM_UP_CALLS + 2) * 0.5))


@pytest.mark.parametrize("changes", ["argument", "setting"])
def test_a_step_whose_calls_never_repeat_runs_eagerly_with_one_warning(changes: str) -> None:
    training = Training()

    def call(number: int) -> None:
        if changes == "setting":
            training.optimizer.param_groups[0]["momentum"] = number / 1000
        training.step(torch.ones(2), scale=1.0 + (changes == "argument") * number)

    for number in range(MAX_CONSTANTS):
        call(number)
    with pytest.warns(UserWarning, match="64 calls all differed in an argument or in a setting"):
        call(MAX_CONSTANTS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(MAX_CONSTANTS)
    assert training.calls == MAX_CONSTANTS + 2


def test_lengths_that_never_repeat_are_no_reason_to_stop_recording() -> None:
    bookkeeping = Training().bookkeeping
    step = CapturedStep(lambda values: values.sum(), bookkeeping, Notes([]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for length in range(1, MAX_CONSTANTS + 3):
            step(torch.ones(length))


def test_warning_names_a_user_line_below_a_folder_named_torch(tmp_path: Path) -> None:
    script = tmp_path / "torch" / "train.py"
    script.parent.mkdir()
    script.write_text("def step(values):\n    raise RuntimeError('not permitted')\n")
    namespace: dict[str, Any] = {}
    exec(compile(script.read_text(), script, "exec"), namespace)
    calls = iter(range(WARM_UP_CALLS))

    def step(values: Tensor) -> Tensor:
        return values if next(calls, None) is not None else namespace["step"](values)

    captured = CapturedStep(step, Training().bookkeeping, Notes([]))
    with pytest.warns(UserWarning, match=rf"{script}:2 \("), pytest.raises(RuntimeError):
        _times(WARM_UP_CALLS + 1, captured)


def test_a_rate_that_changes_inside_is_not_frozen_into_a_graph() -> None:
    training = Training()

    def decaying(values: Tensor) -> Tensor:
        loss = training.one(values)
        training.rate.mul_(0.5)
        return loss

    step = CapturedStep(decaying, training.bookkeeping, Notes([training.weight, training.rate]))
    with pytest.warns(UserWarning, match=r"changes a learning rate; next: run.prepare\(schedule\)"):
        _times(WARM_UP_CALLS + 2, step)
    assert float(training.rate) == pytest.approx(0.5 * 0.5 ** (WARM_UP_CALLS + 2))
