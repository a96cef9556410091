"""Doses in scripts: what is asked for is what is done, counted where that is possible."""

from __future__ import annotations

import importlib
import itertools
import json
import time
from collections.abc import Callable

import ballast
import busy
import calibrate
import exchanges
import faults
import pytest
import rota
import settled
import torch
from torch import nn
from torch.utils.data import TensorDataset

CPU = torch.device("cpu")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    return lambda text: monkeypatch.setenv(rota.ENVIRONMENT, text)


@pytest.fixture
def spun(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What was asked of the busy wait, in milliseconds."""
    found: list[float] = []
    for module in (busy, faults):
        monkeypatch.setattr(module, "spin", found.append)
    return found


def test_nothing_is_asked_for_by_default(asked: Callable[[str], None]) -> None:
    asked("")
    data = TensorDataset(torch.zeros(4))
    assert rota.doses() == {}
    assert faults.data(data, 2) is data
    assert faults.start_worker(10) is None


def test_an_unknown_cause_is_refused(asked: Callable[[str], None]) -> None:
    asked('{"wind": 1}')
    with pytest.raises(ValueError, match=r"'wind'.*imbalance"):
        rota.doses()


def test_a_batch_takes_the_dose_of_input(asked: Callable[[str], None], spun: list[float]) -> None:
    asked('{"input": 6}')
    data = faults.data(TensorDataset(torch.arange(8)), 4)
    assert [int(data[index][0]) for index in range(4)] == [0, 1, 2, 3]
    assert spun == [1.5] * 4


def test_a_disk_keeps_its_rate_and_gives_no_credit(
    asked: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    now = itertools.count(0, 5)
    monkeypatch.setattr(time, "sleep", slept.append)
    # By this clock every sleep takes 5 s: far more than was due, which is taken off the next.
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    asked('{"storage": 6}')
    data = faults.data(TensorDataset(torch.arange(64)), 16)
    assert [int(data[index][0]) for index in range(2)] == [0, 1]
    assert slept == []
    assert int(data[2][0]) == 2
    assert slept == [pytest.approx(3 * 6 / 16 / 1e3)]
    assert int(data[3][0]) == 3
    assert len(slept) == 1


def test_what_comes_after_every_20th_step_is_20_doses_on_rank_0_or_on_all(
    asked: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    asked('{"every-20": 3, "all-every-5": 1}')
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        after_step = faults.after_steps(CPU)
        for _ in range(20):
            after_step()
    every_5th = [pytest.approx(0.005)]
    assert slept == [*(3 * every_5th), pytest.approx(0.06), *(5 * every_5th)]


@pytest.mark.parametrize(("rank", "doses_s"), [("0", [0.002, 0.007]), ("1", [0.007])])
def test_what_comes_after_every_step_is_of_rank_0_or_of_every_host(
    rank: str,
    doses_s: list[float],
    asked: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    asked('{"every-1": 2, "host-work": 7}')
    monkeypatch.setenv("RANK", rank)
    after_step = faults.after_steps(CPU)
    for _ in range(3):
        after_step()
    assert slept == 3 * [pytest.approx(one) for one in doses_s]


def test_one_rank_is_slow(monkeypatch: pytest.MonkeyPatch, spun: list[float]) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        faults.MADE["imbalance"](5.0, CPU)()
        assert spun == [5.0] * int(rank)


def test_the_first_rank_is_slow(monkeypatch: pytest.MonkeyPatch, spun: list[float]) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        faults.MADE["imbalance-0"](5.0, CPU)()
        assert spun == [5.0]


def test_a_rank_by_itself_is_not_slow(monkeypatch: pytest.MonkeyPatch, spun: list[float]) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    faults.MADE["imbalance"](5.0, CPU)()
    assert spun == []


def test_faults_come_with_training_steps_only(
    asked: Callable[[str], None], spun: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked('{"imbalance": 5}')
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    model = faults.plant(nn.Linear(2, 2))
    model(torch.zeros(1, 2))
    model.eval()
    model(torch.zeros(1, 2))
    assert spun == [5.0]


def test_a_count_is_the_dose_over_the_time_of_one() -> None:
    assert calibrate.count_for(5.0, 0.1) == 50
    assert calibrate.count_for(0.01, 0.1) == 1
    assert calibrate.count_for(5.0, 0.0) == calibrate.MOST


def test_permutes_are_as_many_as_the_dose_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []
    monkeypatch.setattr(faults, "timed", lambda act, device: 0.5)
    monkeypatch.setattr(faults, "repeat", lambda act, count: counted.append(count))
    faults.MADE["layout"](3.0, CPU)()
    assert counted == [6]


def test_all_reduces_are_counted_where_they_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    called: list[str] = []

    def group(_: torch.Tensor) -> None:
        """The first five in a row take half as long as the others."""
        called.append("group")
        now[0] += 0.0005 if len(called) <= calibrate.TOGETHER + 1 else 0.001

    monkeypatch.setattr(exchanges, "_reduce_group", group)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor: called.append("own"))
    monkeypatch.setattr(exchanges, "agreed", lambda one, device: one)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    act = exchanges.Synchronization(4.0, CPU)
    for _ in range(exchanges.LEARNT):
        act()
    assert set(called) == {"group"}
    called.clear()
    act()
    assert called == ["own"] * 4


def test_values_are_read_as_often_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []
    monkeypatch.setattr(faults, "repeat", lambda act, count: counted.append(count))
    faults.MADE["host-syncs"](7.0, CPU)()
    assert counted == [7]


def test_a_ballast_leaves_no_room_for_two_of_the_tensors_that_grow() -> None:
    room = ballast.ROOM_BYTES
    small, large = ballast.sizes(room)
    assert 2 * small > room > large > small
    assert small % ballast.PIECE_BYTES == large % ballast.PIECE_BYTES == 0
    # What starting anew costs is spread over many times that it grows, all of about one size.
    assert (large - small) / ballast.PIECE_BYTES > 50
    assert large / small < 1.05
    with pytest.raises(ValueError, match="memory on cpu: allowed are GPUs"):
        faults.MADE["memory"](1.0, CPU)


def test_a_batch_on_its_device_brings_nothing_along(
    asked: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    carried: list[float] = []
    monkeypatch.setattr(faults, "_carry", lambda dose, device: carried.append(dose))
    asked('{"copies": 3}')
    assert faults.moved(torch.ones(2), CPU).sum() == 2
    assert carried == []
    assert faults.moved(torch.ones(2), torch.device("meta")).device.type == "meta"
    assert carried == [3.0]


def test_pageable_memory_is_copied_for_as_long_as_the_dose_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By pieces of a quarter of a millisecond; the first waits for the device and counts not."""
    copied: list[int] = []
    monkeypatch.setattr(time, "perf_counter", lambda: 0.25e-3 * len(copied))

    class Piece:
        def to(self, device: torch.device) -> None:
            copied.append(1)

    monkeypatch.setattr(faults, "_piece", Piece)
    faults._carry(3.0, torch.device("meta"))
    assert len(copied) == 1 + 12


def test_nothing_is_exchanged_by_one_process_alone() -> None:
    for cause in ("synchronization", "link"):
        faults.MADE[cause](5.0, CPU)()


def test_a_late_worker_is_late_by_the_dose_of_every_batch(
    asked: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    asked('{"epoch-boundary": 2}')
    start = faults.start_worker(50)
    assert start is not None
    start(0)
    assert slept == [0.1]


def test_a_busy_wait_lasts_as_long_as_asked() -> None:
    begin = time.perf_counter()
    busy.spin(5.0)
    assert time.perf_counter() - begin >= 0.005


def test_the_time_of_one_is_the_median_of_groups() -> None:
    calls: list[int] = []
    assert calibrate.timed(lambda: calls.append(1), CPU) < 5
    assert len(calls) == (calibrate.PROBES + 2) * calibrate.TOGETHER


def test_what_was_settled_before_is_not_learnt_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert settled.settled("layout", 5.0, lambda: 31) == 31
    assert capsys.readouterr().out == '{"settled": {"layout 5": 31}}\n'
    monkeypatch.setenv(settled.ENVIRONMENT, '{"layout 5": 31, "synchronization 99": 4}')
    assert settled.settled("layout", 5.0, lambda: 7) == 31
    assert capsys.readouterr().out == ""
    assert settled.settled("layout", 6.0, lambda: 7) == 7
    reduced: list[torch.Tensor] = []
    monkeypatch.setattr(torch.distributed, "all_reduce", reduced.append)
    exchanges.Synchronization(99.0, CPU)()
    assert len(reduced) == 4


def test_doses_take_turns_while_the_clock_tells_what_a_step_takes(
    asked: Callable[[str], None],
    spun: list[float],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    parts = importlib.import_module("parts")
    asked('[{}, {"imbalance": 3}, {"imbalance": 5}]')
    monkeypatch.setattr(rota, "_turn", 0)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    model, clock = faults.plant(nn.Linear(2, 2)), parts.Clock(2)
    of_one = parts.WARMUP + 2
    for step in range(3 * of_one):
        model(torch.zeros(1, 2))
        assert clock.step() == (step == 3 * of_one - 1)
    assert spun == [3.0] * of_one + [5.0] * of_one
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["turn"] for one in printed] == [0, 1, 2]


@pytest.mark.parametrize(("rank", "workers", "pauses_s"), [(0, 0, 0.5), (0, 2, 0.2), (1, 2, 0.0)])
def test_a_pass_begins_after_a_pause_of_all_ranks_or_of_the_first(
    rank: int,
    workers: int,
    pauses_s: float,
    asked: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where workers start late, all ranks' is in that."""
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setenv("RANK", str(rank))
    asked('{"pass-0": 2, "epoch-boundary": 3}')
    faults.between(100, workers)()
    assert sum(slept) == pytest.approx(pauses_s)
