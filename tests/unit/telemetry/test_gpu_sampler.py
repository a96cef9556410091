from __future__ import annotations

from itertools import count

import pytest

from nfold.telemetry.host import HostSnapshot, ProcessTimes
from nfold.telemetry.nvml import Nvml
from nfold.telemetry.sampler import GpuSampler, count_other_processes, in_host_pid_namespace
from nvml_fake import FakeCard, FakeNvml

SEEN = HostSnapshot(
    0, 0, 0, 0, None, {5: ProcessTimes(1, 1, 0, 0, 0), 6: ProcessTimes(5, 1, 0, 0, 0)}
)


def _gpus(cards: list[FakeCard], indices: list[int], **options: float) -> GpuSampler:
    visible = Nvml(FakeNvml(cards)).cards()
    ticks = count(0.0, 0.04)
    budget_s = options.get("pcie_budget_s", 10.0)
    return GpuSampler(indices, visible, pcie_budget_s=budget_s, clock=lambda: next(ticks))


def test_cells_are_named_by_the_place_in_cuda_s_order() -> None:
    cells = _gpus([FakeCard(0), FakeCard(1)], [1]).cells(SEEN, [5])
    assert cells["gpu1_utilisation_percent"] == 91
    assert not [name for name in cells if name.startswith("gpu0")]


def test_a_card_that_is_not_there_has_no_cells() -> None:
    assert _gpus([FakeCard(0)], [3]).cells(SEEN, [5]) == {}


def test_pcie_readings_rotate_within_their_budget() -> None:
    """Each reading takes one tick of 40 ms: two of three cards fit into 60 ms."""
    gpus = _gpus([FakeCard(i) for i in range(3)], [0, 1, 2], pcie_budget_s=0.06)
    read = []
    for _ in range(3):
        cells = gpus.cells(SEEN, [])
        read.append([i for i in range(3) if f"gpu{i}_pcie_rx_bytes_per_s" in cells])
        assert all(f"gpu{i}_power_w" in cells for i in range(3))
    assert read == [[0, 1], [0, 2], [1, 2]]


@pytest.mark.parametrize(
    ("pids", "own", "pids_true", "expected"),
    [
        ([5, 6, 77], {5, 6}, True, 1),
        ([5, 6], {5, 6}, True, 0),
        ([], {5, 6}, True, 0),
        ([77], {5, 6}, True, 1),
        ([5, 77], {5, 6}, False, 1),
        ([77], {5, 6}, False, None),
        ([], {5, 6}, False, None),
        ([77], set(), True, None),
        (None, {5, 6}, True, None),
    ],
)
def test_other_processes_are_counted_only_with_valid_ids(
    pids: list[int] | None, own: set[int], pids_true: bool, expected: int | None
) -> None:
    assert count_other_processes(pids, own, pids_true) == expected


def test_a_rank_s_descendants_are_its_own() -> None:
    cells = _gpus([FakeCard(0, pids=[6, 5, 9])], [0]).cells(SEEN, [5])
    assert cells["gpu0_other_processes"] == 1


def test_the_pid_namespace_is_known() -> None:
    assert in_host_pid_namespace() in (True, False)
