"""A sweep over a real store: order, resuming, stopping, unsupported rows, what it tells."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from made import machine
from nfold.bench.grid import Grid, build_grids, parse_axes
from nfold.bench.sweep import (
    CellRun,
    SweepEvents,
    SweepSchedule,
    run_sweep,
    schedule_sweep,
    sort_by_grid,
)
from nfold.core.errors import StoreUnusable
from nfold.core.machine import Machine
from nfold.core.measurement import FailureCause, Measurement, Status
from nfold.core.plan import Plan
from nfold.core.workload import Workload
from nfold.launch.launch_spec import RunOptions, RunProgress
from nfold.launch.workload_run import run as real_run
from nfold.store.store import Store

HOST = machine(gpus=4, cores=16)


class Runner:
    """Stands in for ``run``: gives every plan the planted status, and notes what it was asked."""

    numbers = itertools.count()

    def __init__(self, statuses: dict[int, Status] | None = None) -> None:
        self.statuses = statuses or {}
        self.asked: list[tuple[int, int]] = []

    def __call__(
        self, workload: Workload, plan: Plan, *, machine: Machine, options: RunOptions, repeat: int
    ) -> Measurement:
        batch = plan.batch or 0
        self.asked.append((repeat, batch))
        options.on_progress(RunProgress(phase="stepping", step=1, total=2))
        status: Status = self.statuses.get(batch, "ok")
        return Measurement(
            id=f"{plan.id}-{repeat}-{next(self.numbers)}",
            workload=workload,
            plan=plan,
            machine=machine,
            status=status,
            repeat=repeat,
            cause=None if status == "ok" else FailureCause(text="planted"),
        )


class Noting(SweepEvents):
    """Keeps what a sweep tells, and whether the store had it by then."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.told: list[str] = []

    def cell_started(self, turn: CellRun) -> None:
        self.told.append(f"started {turn.cell.label}")

    def progress(self, progress: RunProgress) -> None:
        self.told.append(f"step {progress.step}")

    def cell_finished(self, turn: CellRun, measurement: Measurement) -> None:
        assert self.store.find(turn.cell.id, turn.repeat) == measurement
        self.told.append(f"finished {turn.cell.label}")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path) as opened:
        yield opened


def _grid(batches: str = "1,2,3,4", step: str | None = None) -> Grid:
    lists = {"batch": batches, "devices": "1", "framework": "simulated", "step": step}
    axes = parse_axes("digits", lists, common=Plan(steps=20))

    def unsupported(workload: Workload, plan: Plan, host: Machine) -> str | None:
        return "planted" if plan.step == "captured" else None

    return build_grids([axes], HOST, unsupported)


def _sweep(
    planned: SweepSchedule,
    store: Store,
    run: Runner,
    events: SweepEvents | None = None,
    **options: RunOptions,
) -> list[Measurement]:
    told = options.get("options", RunOptions(results=store.path.parent))
    return run_sweep(
        planned, store=store, machine=HOST, options=told, run=run, events=events or SweepEvents()
    )


def test_every_round_has_every_cell_once_in_an_order_of_its_own(store: Store) -> None:
    planned = schedule_sweep(_grid("1,2,3,4,5,6"), store, repeats=4)
    orders = [[t.cell.plan.batch for t in planned.pending[i : i + 6]] for i in range(0, 24, 6)]
    assert [turn.repeat for turn in planned.pending] == [i // 6 for i in range(24)]
    assert [sorted(map(int, map(str, order))) for order in orders] == [[1, 2, 3, 4, 5, 6]] * 4
    assert len({tuple(order) for order in orders}) > 1


def test_the_order_is_the_same_for_the_same_seed(store: Store) -> None:
    first, again = (schedule_sweep(_grid("1,2,3,4,5,6"), store, seed=3) for _ in range(2))
    assert first == again
    assert first != schedule_sweep(_grid("1,2,3,4,5,6"), store, seed=4)


def test_each_measurement_is_in_the_store_before_the_next_begins(store: Store) -> None:
    stored: list[int] = []

    class Counting(Runner):
        def __call__(
            self,
            workload: Workload,
            plan: Plan,
            *,
            machine: Machine,
            options: RunOptions,
            repeat: int,
        ) -> Measurement:
            stored.append(len(store.measurements()))
            return super().__call__(workload, plan, machine=machine, options=options, repeat=repeat)

    found = _sweep(schedule_sweep(_grid(), store), store, Counting())
    assert stored == [0, 1, 2, 3]
    assert store.measurements() == found


def test_a_sweep_tells_what_happens_in_order(store: Store) -> None:
    events = Noting(store)
    _sweep(schedule_sweep(_grid("7"), store), store, Runner(), events)
    assert events.told == ["started digits", "step 1", "finished digits"]
    _sweep(schedule_sweep(_grid("7"), store), store, Runner(), events)
    assert events.told[3:] == []


def test_a_rerun_runs_only_what_is_missing(store: Store) -> None:
    _sweep(schedule_sweep(_grid("1,2"), store), store, Runner())
    later = Runner()
    planned = schedule_sweep(_grid("1,2,3"), store, repeats=2)
    found = _sweep(planned, store, later)
    assert sorted(later.asked) == [(0, 3), (1, 1), (1, 2), (1, 3)]
    assert len(planned.done) == 2
    assert len(found) == 6


@pytest.mark.parametrize(
    ("status", "reruns"),
    [
        ("ok", False),
        ("oom", False),
        ("crashed", False),
        ("hung", False),
        ("diverged", False),
        ("interrupted", True),
        ("killed", True),
        ("unsupported", True),
    ],
)
def test_what_was_cut_short_or_is_possible_by_now_is_run_again(
    store: Store, status: Status, reruns: bool
) -> None:
    _sweep(schedule_sweep(_grid("5"), store), store, Runner({5: status}))
    assert len(schedule_sweep(_grid("5"), store).pending) == int(reruns)


def test_again_runs_everything_and_the_newest_counts(store: Store) -> None:
    _sweep(schedule_sweep(_grid("5"), store), store, Runner({5: "crashed"}))
    _sweep(schedule_sweep(_grid("5"), store, again=True), store, Runner())
    (only,) = store.measurements()
    assert only.status == "ok"


def test_a_failed_run_does_not_end_the_sweep(store: Store) -> None:
    runner = Runner({1: "oom", 2: "killed", 3: "hung"})
    found = _sweep(schedule_sweep(_grid(), store), store, runner)
    assert sorted(m.status for m in found) == ["hung", "killed", "ok", "oom"]


def test_a_combination_that_cannot_run_is_one_row_that_is_never_run(store: Store) -> None:
    runner = Runner()
    grid = _grid("8", step="eager,captured")
    found = sort_by_grid(grid, _sweep(schedule_sweep(grid, store, repeats=3), store, runner))
    assert [m.status for m in found] == ["ok", "ok", "ok", "unsupported"]
    assert found[3].cause == FailureCause(text="planted")
    assert found[3].cell == grid.cells[1].id
    assert len(runner.asked) == 3
    assert not schedule_sweep(grid, store, repeats=3).pending


def test_a_request_to_stop_ends_the_sweep_after_the_run(store: Store) -> None:
    options = RunOptions(results=store.path.parent)

    class Interrupted(Runner):
        def __call__(
            self,
            workload: Workload,
            plan: Plan,
            *,
            machine: Machine,
            options: RunOptions,
            repeat: int,
        ) -> Measurement:
            options.stop.signum = 15 if len(self.asked) == 1 else None
            self.statuses = {plan.batch or 0: "interrupted"} if options.stop else {}
            return super().__call__(workload, plan, machine=machine, options=options, repeat=repeat)

    runner = Interrupted()
    found = _sweep(schedule_sweep(_grid(), store), store, runner, options=options)
    assert [m.status for m in found] == ["ok", "interrupted"]
    assert store.measurements() == found
    assert len(schedule_sweep(_grid(), store).pending) == 3


def test_a_store_that_fails_ends_the_sweep_at_once(store: Store) -> None:
    class Full(Store):
        def append(self, measurement: Measurement) -> None:
            raise StoreUnusable("the disk is full")

    runner = Runner()
    with Full.open(store.path.parent) as full, pytest.raises(StoreUnusable):
        _sweep(schedule_sweep(_grid(), full), full, runner)
    assert len(runner.asked) == 1


def test_the_result_is_ordered_as_the_grid(store: Store) -> None:
    grid = _grid("4,3,2,1")
    found = sort_by_grid(grid, _sweep(schedule_sweep(grid, store, repeats=2), store, Runner()))
    assert [(m.plan.batch, m.repeat) for m in found] == [
        (batch, repeat) for batch in (4, 3, 2, 1) for repeat in (0, 1)
    ]


def test_with_the_real_verb_and_planted_costs(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = '[{"kind": "oom", "batch_per_device": 64}]'
    monkeypatch.setenv("NFOLD_SIMULATED", f'{{"failures": {failures}}}')
    grid = _grid("32,64")
    found = run_sweep(
        schedule_sweep(grid, store),
        store=store,
        machine=HOST,
        options=RunOptions(results=store.path.parent),
        run=real_run,
        events=SweepEvents(),
    )
    assert [m.status for m in sort_by_grid(grid, found)] == ["ok", "oom"]
    assert store.measurements() == found
