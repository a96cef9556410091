from __future__ import annotations

import os

import pytest

from nfold.telemetry.host import HostSnapshot, ProcessTimes, SnapshotInterval

ME, PARENT, AGENT, RANK, WORKER, STRANGER = (
    os.getpid(),
    2_000_001,
    2_000_002,
    2_000_003,
    2_000_004,
    7,
)
TREE = {ME: PARENT, PARENT: 1, AGENT: PARENT, RANK: AGENT, WORKER: RANK, STRANGER: 1}


def _snapshot(
    at_s: float, seconds: dict[int, float], *, working_s: float = 0.0, read: int | None = None
) -> HostSnapshot:
    """A two-core host: ``total_s`` runs twice as fast as the clock; interrupts take nothing."""
    found = {pid: ProcessTimes(TREE[pid], 1.0, s, 0.0, 100) for pid, s in seconds.items()}
    return HostSnapshot(at_s, working_s, working_s, 2 * at_s, read, found)


def test_a_rank_s_load_holds_its_loader_workers() -> None:
    before = _snapshot(10, {RANK: 5.0, WORKER: 1.0})
    after = _snapshot(12, {RANK: 6.5, WORKER: 2.0})
    assert SnapshotInterval(before, after).tree_cpu_percent(RANK) == pytest.approx(125)


def test_a_process_that_is_new_counts_from_its_beginning() -> None:
    before = _snapshot(10, {})
    after = _snapshot(11, {RANK: 0.3, WORKER: 0.1})
    assert SnapshotInterval(before, after).tree_cpu_percent(RANK) == pytest.approx(40)


def test_an_id_that_was_given_to_a_new_process() -> None:
    before = _snapshot(10, {RANK: 50.0})
    again = ProcessTimes(AGENT, started=2.0, cpu_s=0.5, reaped_s=0.0, rss_bytes=1)
    after = HostSnapshot(11, 0, 0, 22, None, {RANK: again})
    assert SnapshotInterval(before, after).tree_cpu_percent(RANK) == pytest.approx(50)


def test_a_rank_that_has_ended_has_no_load() -> None:
    before, after = _snapshot(10, {RANK: 5.0}), _snapshot(11, {})
    assert SnapshotInterval(before, after).tree_cpu_percent(RANK) is None


def test_everybody_else_s_load_leaves_out_nfold_and_its_ranks() -> None:
    before = _snapshot(10, dict.fromkeys(TREE, 0.0), working_s=100)
    used = {ME: 0.01, PARENT: 0.04, AGENT: 0.05, RANK: 0.6, WORKER: 0.1, STRANGER: 0.7}
    after = _snapshot(11, used, working_s=100 + sum(used.values()))
    assert SnapshotInterval(before, after).other_load_percent([RANK], PARENT) == pytest.approx(70)
    assert SnapshotInterval(before, after).other_load_percent([], PARENT) == pytest.approx(145)


def test_ranks_that_end_are_not_another_s_load_in_their_last_moment() -> None:
    """Rank and agent ended within the interval; nfold inherited all that they ever used."""
    before = _snapshot(10, {PARENT: 1.0, AGENT: 2.0, RANK: 50.0, WORKER: 5.0}, working_s=100)
    heir = ProcessTimes(TREE[PARENT], 1.0, cpu_s=1.1, reaped_s=57.8, rss_bytes=1)
    after = HostSnapshot(11, 101.1, 101.1, 22, None, {PARENT: heir})
    assert SnapshotInterval(before, after).other_load_percent([RANK], PARENT) == pytest.approx(20)


def test_workers_that_a_rank_left_behind_are_not_another_s_load() -> None:
    """It was killed with them: nobody waited for the workers, who computed 40 s in all."""
    before = _snapshot(10, {PARENT: 1.0, AGENT: 2.0, RANK: 50.0, WORKER: 40.0}, working_s=100)
    heir = ProcessTimes(TREE[AGENT], 1.0, cpu_s=2.0, reaped_s=50.4, rss_bytes=1)
    there = {PARENT: ProcessTimes(TREE[PARENT], 1.0, 1.1, 0.0, 1), AGENT: heir}
    after = HostSnapshot(11, 101.4, 101.4, 22, None, there)
    assert SnapshotInterval(before, after).other_load_percent([RANK], PARENT) is None


def test_a_rank_that_is_new_under_an_agent_that_is_not() -> None:
    before = _snapshot(10, {PARENT: 1.0, AGENT: 20.0}, working_s=100)
    after = _snapshot(11, {PARENT: 1.0, AGENT: 20.1, RANK: 0.4}, working_s=101)
    assert SnapshotInterval(before, after).other_load_percent([RANK], PARENT) == pytest.approx(50)


def test_a_process_that_cannot_be_seen_is_another_s() -> None:
    before = _snapshot(10, {RANK: 0.0}, working_s=100)
    after = _snapshot(11, {RANK: 0.5}, working_s=101.5)
    assert SnapshotInterval(before, after).other_load_percent([RANK], PARENT) == pytest.approx(100)


def test_rounding_never_makes_a_negative_load() -> None:
    before = _snapshot(10, {RANK: 0.0}, working_s=100)
    after = _snapshot(11, {RANK: 0.52}, working_s=100.5)
    assert SnapshotInterval(before, after).other_load_percent([RANK], PARENT) == 0.0


def test_the_host_s_load_is_of_all_cores() -> None:
    before, after = _snapshot(10, {}, working_s=5), _snapshot(12, {}, working_s=7)
    assert SnapshotInterval(before, after).cpu_percent() == pytest.approx(50)


def test_disk_reads_per_second() -> None:
    before, after = _snapshot(10, {}, read=100), _snapshot(12, {}, read=5100)
    assert SnapshotInterval(before, after).disk_read_bytes_per_s() == pytest.approx(2500)
    unknown = SnapshotInterval(before, _snapshot(12, {}, read=None))
    assert unknown.disk_read_bytes_per_s() is None


def test_no_rates_over_a_moment_or_with_a_clock_that_stands_still() -> None:
    before = _snapshot(10, {RANK: 1.0}, working_s=5, read=1)
    moment = SnapshotInterval(before, _snapshot(10.01, {RANK: 1.01}, working_s=5.01, read=2))
    assert moment.cpu_percent() is None
    assert moment.disk_read_bytes_per_s() is None
    assert moment.tree_cpu_percent(RANK) is None
    assert moment.other_load_percent([RANK], PARENT) is None
    still = SnapshotInterval(before, HostSnapshot(11, 5, 5, before.total_s, 1, before.processes))
    assert still.cpu_percent() is None
    assert still.other_load_percent([RANK], PARENT) is None
