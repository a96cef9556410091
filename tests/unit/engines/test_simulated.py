"""The simulated framework against closed forms: exact costs, planted failures, refusals."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from made import machine, plan
from nfold.analysis.cells import Cell, epochs, first_step_ms, group_cells, step_ms
from nfold.analysis.comparison import compare_with_baseline
from nfold.core.errors import Diverged, Hung, Killed, OutOfMemory, RunFailure, UsageError
from nfold.core.measurement import Measurement, RankSamples
from nfold.core.workload import Workload
from nfold.engines import base
from nfold.engines.base import Observer, Phase, Task
from nfold.engines.simulated import PlantedFailure, Scenario, Simulated
from nfold.launch.launch_spec import RunOptions
from nfold.launch.verdict import rank_caveats
from nfold.launch.workload_run import run

HOST = machine(gpus=4, cores=16)


def _task(rank: int = 0, devices: int = 1, **changes: Any) -> Task:
    complete = plan(HOST, framework="simulated", device="cuda", devices=devices, **changes)
    world_size = 1 if complete.strategy == "dp" else devices
    return Task(
        workload=Workload(name="digits"),
        plan=complete,
        machine=HOST,
        rank=rank,
        local_rank=rank,
        world_size=world_size,
    )


def _rank(script: Scenario, rank: int = 0, **changes: Any) -> RankSamples:
    return Simulated(script).run_rank(_task(rank, **changes), Observer())


def _measured(script: Scenario, **changes: Any) -> Measurement:
    first = _task(**changes)
    return Measurement(
        id=f"{first.plan.id}",
        workload=first.workload,
        plan=first.plan,
        machine=HOST,
        status="ok",
        ranks=tuple(_rank(script, rank, **changes) for rank in range(first.world_size)),
    )


def _cell(script: Scenario, **changes: Any) -> Cell:
    (cell,) = group_cells([_measured(script, **changes)])
    return cell


def _speedup(script: Scenario, devices: int, *, weak: bool = False, **changes: Any) -> float:
    batch = changes.pop("batch")
    one = _cell(script, batch=batch, devices=1)
    many = _cell(script, batch=batch * devices if weak else batch, devices=devices, **changes)
    compared = compare_with_baseline(many, [one])
    assert compared is not None
    assert compared.scaling == ("weak" if weak else "strong")
    return compared.speedup.value


@pytest.mark.parametrize("devices", [2, 3, 4])
@pytest.mark.parametrize(("compute", "exchange"), [(0.01, 0.0), (0.01, 2.5), (0.0001, 40.0)])
def test_strong_scaling_is_the_closed_form(devices: int, compute: float, exchange: float) -> None:
    script = Scenario(compute_ms_per_sample=compute, exchange_ms=exchange, samples_per_epoch=5400)
    expected = (540 * compute) / (540 / devices * compute + exchange)
    assert _speedup(script, devices, batch=540) == pytest.approx(expected, rel=1e-12)


def test_weak_scaling_is_the_closed_form() -> None:
    script = Scenario(compute_ms_per_sample=0.02, exchange_ms=3.0, samples_per_epoch=5120)
    expected = 4 * (128 * 0.02) / (128 * 0.02 + 3.0)
    assert _speedup(script, 4, weak=True, batch=128) == pytest.approx(expected, rel=1e-12)


def test_without_an_exchange_n_devices_are_n_fold() -> None:
    assert _speedup(Scenario(samples_per_epoch=5120), 4, batch=512) == pytest.approx(4, rel=1e-12)


def test_every_cost_of_a_step_adds_up() -> None:
    script = Scenario(
        compute_ms_per_sample=0.01,
        input_ms_per_sample=0.02,
        copy_ms_per_sample=0.03,
        host_ms=1.5,
        exchange_ms=0.25,
        straggler_ms=7.0,
        straggler_rank=1,
    )
    found = step_ms(_cell(script, devices=2, batch=100, steps=20))
    assert found is not None
    assert found.value == pytest.approx(50 * 0.06 + 1.5 + 0.25 + 7.0, rel=1e-12)
    assert found.low == pytest.approx(found.value, rel=1e-12)


def test_ranks_wait_for_the_straggler_but_their_own_steps_are_short() -> None:
    script = Scenario(compute_ms_per_sample=0.1, straggler_ms=4.0, straggler_rank=1)
    fast, slow = (_rank(script, rank, devices=2, batch=100, steps=10) for rank in (0, 1))
    assert fast.windows == slow.windows
    assert fast.step_ms == pytest.approx([5.0] * len(fast.step_ms))
    assert slow.step_ms == pytest.approx([9.0] * len(slow.step_ms))
    assert [doubt.kind for doubt in rank_caveats([fast, slow])] == ["slow_rank"]


def test_data_parallel_in_one_process_is_one_rank_with_a_cost_of_its_own() -> None:
    script = Scenario(compute_ms_per_sample=0.1, exchange_ms=1.0, dp_exchange_ms=6.0)
    changes: dict[str, Any] = {"devices": 4, "strategy": "dp", "batch": 100, "steps": 10}
    assert Simulated(script).process_count(_task(**changes).plan) == 1
    (only,) = _measured(script, **changes).ranks
    assert only.step_ms[0] == pytest.approx(25 * 0.1 + 1.0 + 6.0)
    assert {window.samples / window.steps for window in only.windows} == {100}


def test_the_first_step_is_reported_apart_from_the_windows() -> None:
    script = Scenario(compute_ms_per_sample=0.1, first_step_ms=800.0)
    found = _measured(script, batch=100, steps=20)
    assert first_step_ms(found) == pytest.approx(810.0)
    assert max(found.ranks[0].step_ms) == pytest.approx(10.0)


def test_epochs_hold_their_gap_their_first_step_and_the_rest_of_the_data() -> None:
    script = Scenario(
        compute_ms_per_sample=1.0, first_step_ms=500.0, epoch_gap_ms=250.0, samples_per_epoch=250
    )
    found = epochs(_measured(script, batch=100, epochs=3))
    assert [epoch.seconds for epoch in found] == pytest.approx([0.75, 0.5, 0.5])
    assert [epoch.samples for epoch in found] == [250, 250, 250]
    assert found[0].accuracy is not None
    assert found[2].accuracy is not None
    assert found[2].accuracy > found[0].accuracy
    assert found[0].train_loss is not None
    assert found[2].train_loss is not None
    assert found[2].train_loss < found[0].train_loss


def test_windows_follow_each_other_on_the_virtual_clock() -> None:
    script = Scenario(compute_ms_per_sample=1.0, epoch_gap_ms=250.0, samples_per_epoch=500)
    windows = _rank(script, batch=100, epochs=4, warmup_steps=2).windows
    assert sum(window.steps for window in windows) == 18
    gaps = [b.start_s - a.start_s - a.seconds for a, b in pairwise(windows)]
    assert sum(gaps) == pytest.approx(3 * 0.25)
    assert [gap for gap in gaps if gap > 1e-9] == pytest.approx([0.25] * 3)


def test_samples_are_divided_without_loss_whatever_the_batch() -> None:
    ranks = [
        _rank(Scenario(samples_per_epoch=1000), r, devices=3, batch=128, epochs=1) for r in range(3)
    ]
    assert sum(rank.sample_hashes[0][0] for rank in ranks) == 1000
    assert len({rank.sample_hashes[0][1] for rank in ranks}) == 3
    assert len({rank.parameter_checksum for rank in ranks}) == 1


@pytest.mark.parametrize(
    ("planted", "kind"), [("same_samples", "same_samples"), ("no_exchange", "parameters_differ")]
)
def test_planted_mistakes_are_found_by_the_checks(planted: str, kind: str) -> None:
    script = Scenario(**{"samples_per_epoch": 5120, planted: True})  # type: ignore[arg-type]
    ranks = _measured(script, devices=2, batch=128, epochs=1).ranks
    assert [doubt.kind for doubt in rank_caveats(ranks)] == [kind]


def test_noise_is_the_same_every_time_and_another_with_another_seed() -> None:
    noisy = Scenario(noise=0.1)
    first, again = (_rank(noisy, batch=100, steps=30) for _ in range(2))
    other = _rank(Scenario(noise=0.1, noise_seed=1), batch=100, steps=30)
    assert first == again
    assert first.step_ms != other.step_ms
    assert len(set(first.step_ms)) > 1


def test_under_noise_every_rank_has_the_windows_of_the_slowest() -> None:
    ranks = [_rank(Scenario(noise=0.2), rank, devices=2, batch=100, steps=20) for rank in (0, 1)]
    slowest = sum(max(pair) for pair in zip(*(rank.step_ms for rank in ranks), strict=True))
    assert ranks[0].step_ms != ranks[1].step_ms
    for rank in ranks:
        assert 1e3 * sum(w.seconds for w in rank.windows) == pytest.approx(slowest)


@pytest.mark.parametrize(
    ("kind", "error", "status"),
    [
        ("oom", OutOfMemory, "oom"),
        ("crash", RunFailure, "crashed"),
        ("hang", Hung, "hung"),
        ("kill", Killed, "killed"),
        ("diverged", Diverged, "diverged"),
    ],
)
def test_a_planted_failure_is_raised_on_its_rank_in_its_step(
    kind: Any, error: type[RunFailure], status: str
) -> None:
    script = Scenario(failures=(PlantedFailure(kind=kind, step=15, rank=1),))
    with pytest.raises(error) as raised:
        _rank(script, 1, devices=2, batch=100, steps=20)
    assert raised.value.step == 15
    assert raised.value.status == status
    others = _rank(script, 0, devices=2, batch=100, steps=20)
    assert len(others.step_ms) == 14 - others.warmup_steps


def test_memory_runs_out_from_a_batch_per_device_on() -> None:
    script = Scenario(failures=(PlantedFailure(kind="oom", batch_per_device=256),), memory_bytes=0)
    fits = _rank(script, devices=2, batch=510, steps=5)
    assert fits.peak_memory_bytes == 255 * script.memory_bytes_per_sample
    with pytest.raises(OutOfMemory) as raised:
        _rank(script, devices=2, batch=511, steps=5)
    assert raised.value.peak_memory_bytes == 256 * script.memory_bytes_per_sample


def test_a_failure_may_be_planted_on_one_number_of_devices() -> None:
    script = Scenario(failures=(PlantedFailure(kind="crash", devices=2),))
    assert _rank(script, devices=4, batch=100, steps=5).windows
    with pytest.raises(RunFailure):
        _rank(script, devices=2, batch=100, steps=5)


def test_a_rank_beats_in_every_step_and_saves_what_it_measured() -> None:
    class Noting(Observer):
        def __init__(self) -> None:
            self.beats: list[tuple[Phase, int, int]] = []
            self.saved: list[RankSamples] = []

        def beat(self, phase: Phase, step: int, total: int = 0) -> None:
            self.beats.append((phase, step, total))

        def save(self, samples: RankSamples, *, epoch_ended: bool = False) -> None:
            self.saved.append(samples)

    noting = Noting()
    script = Scenario(failures=(PlantedFailure(kind="hang", step=4),))
    with pytest.raises(Hung):
        Simulated(script).run_rank(_task(batch=100, steps=5, warmup_steps=0), noting)
    assert noting.beats == [
        (Phase.FIRST_STEP, 1, 5),
        (Phase.STEPPING, 2, 5),
        (Phase.STEPPING, 3, 5),
    ]
    assert len(noting.saved[0].step_ms) == 2


def test_planted_refusals_are_given_with_a_reason() -> None:
    chosen = Simulated(Scenario(unsupported={"step": ("captured",)}))
    eager, captured = (_task(step=step, steps=5) for step in ("eager", "captured"))
    assert chosen.unsupported_reason(eager.workload, eager.plan, HOST) is None
    reason = chosen.unsupported_reason(captured.workload, captured.plan, HOST)
    assert reason == "step 'captured' is planted as unsupported"


def test_the_workload_may_refuse_too() -> None:
    reason = Simulated(Scenario()).unsupported_reason(
        Workload(name="conv2d"), _task(batch=840, epochs=1).plan, HOST
    )
    assert reason is not None
    assert "conv2d has no epochs" in reason


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.delenv("NFOLD_SIMULATED", raising=False)
    return monkeypatch


def test_the_script_comes_from_the_environment(environment: pytest.MonkeyPatch) -> None:
    assert Simulated().scenario == Scenario()
    environment.setenv(
        "NFOLD_SIMULATED",
        '{"exchange_ms": 2, "failures": [{"kind": "oom", "batch_per_device": 512}],'
        ' "unsupported": {"step": ["captured"]}}',
    )
    found = base.get_framework("simulated")
    assert isinstance(found, Simulated)
    assert found.scenario == Scenario(
        exchange_ms=2.0,
        failures=(PlantedFailure(kind="oom", batch_per_device=512),),
        unsupported={"step": ("captured",)},
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"exchanges_ms": 2}', "exchanges_ms"),
        ('{"failures": [{"kind": "melts"}]}', "melts"),
        ('{"unsupported": {"stepp": ["captured"]}}', "stepp"),
        ('{"samples_per_epoch": 0}', "samples_per_epoch 0"),
        ("[]", "not of type dict"),
        ("{", "NFOLD_SIMULATED"),
    ],
)
def test_a_wrong_script_is_refused(environment: pytest.MonkeyPatch, text: str, said: str) -> None:
    environment.setenv("NFOLD_SIMULATED", text)
    with pytest.raises(UsageError, match=said):
        Simulated()


def test_run_uses_no_process_or_folder(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    environment.setenv("NFOLD_SIMULATED", '{"failures": [{"kind": "diverged", "step": 7}]}')
    asked = _task(devices=2, batch=100, steps=20)
    found = run(asked.workload, asked.plan, machine=HOST, options=RunOptions(results=tmp_path))
    assert found.status == "diverged"
    assert found.cause is not None
    assert (found.cause.rank, found.cause.step) == (0, 7)
    assert list(tmp_path.iterdir()) == []
