"""A user's step as CUDA graphs, with a recorder that needs no GPU."""

from __future__ import annotations

import os
import re
import warnings
import weakref
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
from nfold.engines.torch.run import captured_step
from nfold.engines.torch.run.captured_step import CapturedStep
from nfold.engines.torch.run.state import RunBookkeeping
from nfold.engines.torch.step import cuda_graph
from nfold.engines.torch.step.cuda_graph import MANY_FORMS, WARM_UP_CALLS, CaptureFailed

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
        self._kept, self.refuses = kept, refuses
        self.recordings = 0

    def run_on_capture_stream(self, call: Callable[[], Any]) -> Any:
        return call()

    def record(self, call: Callable[[], Any]) -> tuple[Graph, Any]:
        self.recordings += 1
        before = [tensor.detach().clone() for tensor in self._kept]
        try:
            result = call().clone()
            if self.refuses is not None:
                raise self.refuses
        except Exception as error:
            raise CaptureFailed from error
        finally:
            for tensor, value in zip(self._kept, before, strict=True):
                tensor.data.copy_(value)
        return Graph(call, result), result

    def pool_bytes(self) -> int:
        return 3 * 2**29


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


def test_more_shapes_than_graphs_are_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graph, "MAX_GRAPHS", 2)
    step = CapturedStep(lambda values: values, Training().bookkeeping, Notes([]))
    for length in (1, 2, 5):
        step(torch.ones(7 + length))
        for _ in range(WARM_UP_CALLS):
            step(torch.ones(length))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(torch.ones(1)), step(torch.ones(2))
    message = (
        "step <lambda>: 2 CUDA graphs hold 1.5 GiB; 4 other sets of shapes, numbers and objects so "
        "far run eagerly; next: run.loader(..., pad_to=64) if lengths vary; a number that changes in "
        "each step as a tensor"
    )
    with pytest.warns(UserWarning, match=re.escape(message)) as caught:
        [step(torch.ones(5)) for _ in range(3)]
    (warning,) = caught
    assert warning.filename == __file__


def test_without_memory_for_a_further_graph_the_others_stay() -> None:
    training = Training()
    step = CapturedStep(training.one, training.bookkeeping, recorder := Notes([training.weight]))
    _times(WARM_UP_CALLS + 1, step)
    recorder.refuses = torch.OutOfMemoryError("CUDA out of memory")
    for _ in range(WARM_UP_CALLS):
        step(torch.ones(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(torch.ones(1))
        calls = training.calls
        _times(2, step)
    assert training.calls == calls
    with pytest.warns(UserWarning, match="1 CUDA graphs .* run eagerly for lack of memory"):
        step(torch.ones(1))
    assert training.prepared.steps == 2 * WARM_UP_CALLS + 5


def test_a_first_graph_without_memory_ends_the_capture() -> None:
    training = Training(refuses=torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.warns(UserWarning, match=r"one runs eagerly: .*out of memory\)") as caught:
        _times(WARM_UP_CALLS + 2, training.step)
    assert [warning.filename for warning in caught] == [__file__]
    assert training.prepared.steps == WARM_UP_CALLS + 2


@pytest.mark.parametrize("before", [None, "1"])
def test_nccl_registers_no_buffer_unless_the_user_wants_it(
    before: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NCCL_GRAPH_REGISTER", raising=False)
    if before is not None:
        monkeypatch.setenv("NCCL_GRAPH_REGISTER", before)
    monkeypatch.setattr(captured_step, "CudaGraphRecorder", lambda _device: Notes([]))
    step = captured_step.captured_step(lambda values: values, Training().bookkeeping)
    assert os.environ["NCCL_GRAPH_REGISTER"] == (before or "0")
    assert torch.equal(step(torch.ones(2)), torch.ones(2))


def test_a_number_that_changes_in_each_step_is_reported_once() -> None:
    step = CapturedStep(lambda values, _number: values, Training().bookkeeping, Notes([]))
    with pytest.warns(UserWarning, match="0 CUDA graphs .* as a tensor") as caught:
        [step(torch.ones(2), number) for number in range(2 * MANY_FORMS)]
    assert [warning.filename for warning in caught] == [__file__]


def test_batches_of_a_dictionary_type_share_a_graph() -> None:
    """Such as the BatchEncoding of a tokenizer."""
    step = CapturedStep(lambda batch: batch["x"] + 1, Training().bookkeeping, recorder := Notes([]))
    values = [float(step(UserDict(x=torch.full((), float(n))))) for n in range(7)]
    assert values == [n + 1.0 for n in range(7)]
    assert recorder.recordings == 1


def test_no_batch_of_a_type_of_the_users_is_kept() -> None:
    class Batch:
        def __init__(self) -> None:
            self.x = torch.ones(2)

    references = []
    step = CapturedStep(lambda batch: batch.x, Training().bookkeeping, Notes([]))
    for _ in range(6):
        batch = Batch()
        step(batch)
        references.append(weakref.ref(batch))
        del batch
    assert [reference() for reference in references] == [None] * 6
