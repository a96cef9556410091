"""Captured functions with a recorder that needs no GPU: which calls run, record and replay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from nfold.engines.torch.step import cuda_graph
from nfold.engines.torch.step.cuda_graph import WARM_UP_CALLS, CapturedFunction, CudaGraphRecorder


class Graph:
    """Runs its call again, into the results of the recording."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self.filled = torch.zeros(())
        self.living = True

    def replay(self) -> None:
        assert self.living
        self.filled.copy_(self._call())

    def reset(self) -> None:
        self.living = False


class Notes:
    """A recorder that notes what it was asked for."""

    def __init__(self) -> None:
        self.aside_calls = 0
        self.graphs: list[Graph] = []

    def run_on_capture_stream(self, call: Callable[[], Any]) -> Any:
        self.aside_calls += 1
        return call()

    def record(self, call: Callable[[], Any]) -> tuple[Graph, Any]:
        self.graphs.append(Graph(call))
        return self.graphs[-1], (self.graphs[-1].filled, {"as": "it is"})

    def pool_bytes(self) -> int:
        return 0


def weighted(values: Tensor, weight: float) -> Any:
    return values.double().sum() * weight


def test_the_first_calls_run_aside_and_the_next_are_replayed_with_their_own_values() -> None:
    notes = Notes()
    captured = CapturedFunction(weighted, notes)
    for call in range(WARM_UP_CALLS):
        assert captured((torch.full((3,), float(call)),), 2.0) == 6.0 * call
    assert (notes.aside_calls, len(notes.graphs)) == (WARM_UP_CALLS, 0)
    kept = [captured((torch.full((3,), float(call)),), 2.0) for call in range(4)]
    assert (notes.aside_calls, len(notes.graphs)) == (WARM_UP_CALLS, 1)
    assert [float(filled) for filled, _ in kept] == [0.0, 6.0, 12.0, 18.0]
    assert kept[0][1] == {"as": "it is"}


def test_a_tensor_that_is_filled_again_in_place_is_read_again() -> None:
    captured = CapturedFunction(weighted, Notes())
    values = torch.ones(3)
    for _ in range(WARM_UP_CALLS + 1):
        captured((values,), 1.0)
    values.fill_(5.0)
    assert captured((values,), 1.0)[0] == 15.0


@pytest.mark.parametrize(
    "other", [(torch.ones(4), 1.0), (torch.ones(3, dtype=torch.int64), 1.0), (torch.ones(3), 0.5)]
)
def test_other_shapes_types_and_constants_have_graphs_of_their_own(
    other: tuple[Tensor, float],
) -> None:
    notes = Notes()
    captured = CapturedFunction(weighted, notes)
    for values, weight in ((torch.ones(3), 1.0), other):
        for _ in range(WARM_UP_CALLS + 2):
            captured((values,), weight)
    assert (notes.aside_calls, len(notes.graphs)) == (2 * WARM_UP_CALLS, 2)
    assert captured((torch.ones(3),), 1.0)[0] == 3.0


def test_too_many_shapes_run_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graph, "MAX_GRAPHS", 2)
    notes = Notes()
    reports: list[int] = []
    captured = CapturedFunction(weighted, notes, on_eager=lambda: reports.append(1))
    for length in (1, 2, 3):
        for _ in range(WARM_UP_CALLS + 2):
            captured((torch.ones(length),), 1.0)
    assert len(notes.graphs) == captured.graphs == 2
    assert captured.forms == 3
    assert notes.aside_calls == 3 * WARM_UP_CALLS + 2
    assert reports == [1]


def test_forms_that_never_return_are_reported_once_and_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cuda_graph, "MANY_FORMS", 5)
    monkeypatch.setattr(cuda_graph, "MAX_FORMS", 8)
    notes = Notes()
    reports: list[int] = []
    captured = CapturedFunction(weighted, notes, on_eager=lambda: reports.append(captured.forms))
    for step in range(20):
        captured((torch.ones(2),), float(step))
    assert reports == [5]
    assert captured.forms == 20
    assert len(captured._calls) <= 8
    for _ in range(WARM_UP_CALLS + 1):
        captured((torch.ones(2),), 0.5)
    assert captured.graphs == 1


def test_closing_resets_every_graph() -> None:
    notes = Notes()
    captured = CapturedFunction(weighted, notes)
    for _ in range(WARM_UP_CALLS + 1):
        captured((torch.ones(3),), 1.0)
    captured.close()
    assert [graph.living for graph in notes.graphs] == [False]


def test_a_pool_s_bytes_are_those_of_its_own_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    held = [((0, 0), 64), ((0, 1), 8), ((0, 2), 32), ((0, 1), 4)]
    segments = [{"segment_pool_id": pool, "total_size": size} for pool, size in held]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    recorder = object.__new__(CudaGraphRecorder)
    recorder._pool = torch.cuda._POOL_HANDLE((0, 1))
    assert recorder.pool_bytes() == 12


def test_a_function_may_be_recorded_in_its_first_call() -> None:
    notes = Notes()
    captured = CapturedFunction(weighted, notes, warm_up=0)
    assert captured((torch.ones(3),), 2.0)[0] == 6.0
    assert (notes.aside_calls, len(notes.graphs)) == (0, 1)


def test_a_form_is_warm_after_its_first_calls() -> None:
    captured = CapturedFunction(weighted, Notes())
    values = (torch.ones(3),)
    for _ in range(WARM_UP_CALLS):
        assert not captured.is_warm(values, 1.0)
        captured(values, 1.0)
    assert captured.is_warm(values, 1.0)
    assert not captured.is_warm((torch.ones(4),), 1.0)
