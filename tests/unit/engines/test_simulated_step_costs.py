"""What a simulated step costs under ablations, against closed forms."""

from __future__ import annotations

from typing import Any

import pytest

from made import machine, plan
from nfold.core.measurement import RankSamples
from nfold.core.variant import Variant
from nfold.core.workload import Workload
from nfold.engines.base import Observer, Task
from nfold.engines.simulated import Scenario, Simulated

HOST = machine(gpus=4, cores=16)


def _ranks(script: Scenario, ablation: Variant | None = None, **changes: Any) -> list[RankSamples]:
    asked = {"framework": "simulated", "device": "cuda", "devices": 2, "batch": 100, "steps": 24}
    complete = plan(HOST, **{**asked, **changes})
    world_size = 1 if complete.strategy == "dp" else complete.devices or 1
    tasks = [
        Task(
            workload=Workload(name="digits"),
            plan=complete,
            machine=HOST,
            requested_variant=ablation,
            rank=rank,
            local_rank=rank,
            world_size=world_size,
        )
        for rank in range(world_size)
    ]
    return [Simulated(script).run_rank(task, Observer()) for task in tasks]


def _step_ms(script: Scenario, ablation: Variant | None = None, **changes: Any) -> float:
    """Of the slowest rank, over all windows."""
    ranks = _ranks(script, ablation, **changes)
    return max(
        1e3 * sum(w.seconds for w in r.windows) / sum(w.steps for w in r.windows) for r in ranks
    )


def test_every_variant_adds_its_own_cost() -> None:
    script = Scenario(
        compute_ms_per_sample=0.2,
        contention_ms=1.0,
        wrapper_ms=0.5,
        latency_ms=0.3,
        transfer_ms=8.0,
        overlap=0.5,
    )
    assert _step_ms(script, devices=1, batch=50) == pytest.approx(10.0)
    assert _step_ms(script, Variant(independent=True)) == pytest.approx(11.0)
    assert _step_ms(script, Variant(exchange="none")) == pytest.approx(11.5)
    assert _step_ms(script, Variant(exchange="barrier")) == pytest.approx(11.8)
    assert _step_ms(script) == pytest.approx(14.8)
    assert _step_ms(script, Variant(gradient_compression="bf16")) == pytest.approx(11.8)


def test_buffers_and_host_syncs_are_independent() -> None:
    script = Scenario(compute_ms_per_sample=0.2, latency_ms=0.3, buffers_ms=0.7, host_syncs_ms=2.0)
    assert _step_ms(script) == pytest.approx(13.0)
    assert _step_ms(script, Variant(broadcast_buffers=False)) == pytest.approx(12.3)
    assert _step_ms(script, Variant(exchange="none")) == pytest.approx(12.0)
    assert _step_ms(script, Variant(host_syncs=False)) == pytest.approx(11.0)
    searched = Scenario(compute_ms_per_sample=0.2, anomaly_ms=4.0)
    without = _step_ms(searched, Variant(anomaly_detection=False))
    assert _step_ms(searched) - without == pytest.approx(4.0)


def test_nobody_looks_for_parameters_without_a_gradient() -> None:
    script = Scenario(compute_ms_per_sample=0.2, unused_ms=0.4)
    assert _step_ms(script) == pytest.approx(10.4)
    assert _step_ms(script, Variant(find_unused_parameters=False)) == pytest.approx(10.0)


def test_a_transfer_that_backward_hides_costs_nothing() -> None:
    script = Scenario(compute_ms_per_sample=0.2, transfer_ms=5.0, overlap=0.5)
    assert _step_ms(script) == pytest.approx(_step_ms(script, Variant(exchange="barrier")))


@pytest.mark.parametrize(("load", "stall"), [(0.5, 0.0), (0.8, 0.0), (1.0, 2.5), (1.6, 10.0)])
def test_loaders_hide_behind_the_step_until_they_are_slower(load: float, stall: float) -> None:
    script = Scenario(compute_ms_per_sample=0.2, load_ms_per_sample=load)
    found = _step_ms(script, workers=4)
    assert found - _step_ms(script, Variant(input="replayed"), workers=4) == pytest.approx(stall)


def test_without_workers_nothing_hides_the_load() -> None:
    script = Scenario(compute_ms_per_sample=0.2, load_ms_per_sample=0.1)
    assert _step_ms(script, workers=0) == pytest.approx(15.0)


def test_loaders_of_several_ranks_share_the_cores_of_the_host() -> None:
    script = Scenario(compute_ms_per_sample=0.2, load_ms_per_sample=0.7, host_cores=4)
    assert _step_ms(script, devices=1, batch=50, workers=4) == pytest.approx(10.0)
    assert _step_ms(script, Variant(independent=True), workers=4) == pytest.approx(17.5)
    assert _step_ms(script, Variant(input="resident"), workers=4) == pytest.approx(10.0)


def test_augmentation_on_the_cpu_is_a_part_of_the_load() -> None:
    script = Scenario(compute_ms_per_sample=0.1, augment_ms_per_sample=0.3)
    assert _step_ms(script, workers=1) == pytest.approx(15.0)
    assert _step_ms(script, Variant(augmentation=False), workers=1) == pytest.approx(5.0)
    assert _step_ms(script, workers=1, augment="device") == pytest.approx(5.0)


def test_replayed_batches_are_still_copied_and_resident_ones_are_not() -> None:
    script = Scenario(compute_ms_per_sample=0.1, copy_ms_per_sample=0.02, input_ms_per_sample=0.04)
    found = [_step_ms(script, Variant(input=kind)) for kind in ("real", "replayed", "resident")]
    assert found == pytest.approx([8.0, 6.0, 5.0])


@pytest.mark.parametrize("exchange", ["none", "barrier"])
def test_only_coupled_ranks_wait_for_a_slow_device(exchange: Any) -> None:
    script = Scenario(compute_ms_per_sample=0.1, straggler_ms=3.0, straggler_rank=1)
    ranks = _ranks(script, Variant(exchange=exchange))
    seconds = [sum(w.seconds for w in r.windows) / sum(w.steps for w in r.windows) for r in ranks]
    first = 0.005 if exchange == "none" else 0.008
    assert seconds == pytest.approx([first, 0.008])


def test_a_straggler_stays_with_its_device_or_with_its_data() -> None:
    apart = Variant(exchange="none", devices=(1, 0))
    moved = {
        kind: [
            rank.step_ms[0]
            for rank in _ranks(Scenario(straggler_ms=3.0, straggler_bound_to=kind), apart)
        ]
        for kind in ("device", "data")
    }
    assert moved["device"] == pytest.approx([0.5, 3.5])
    assert moved["data"] == pytest.approx([3.5, 0.5])
    alone = Scenario(straggler_ms=3.0, straggler_rank=1)
    assert _step_ms(alone, Variant(device=1), devices=1, batch=50) == pytest.approx(3.5)


def test_a_random_straggler_is_every_rank_as_often() -> None:
    script = Scenario(random_straggler_ms=4.0)
    ranks = _ranks(script, Variant(exchange="none"), steps=40)
    assert [sum(rank.step_ms) / 40 for rank in ranks] == pytest.approx([2.5, 2.5], rel=0.05)
    assert _step_ms(script, Variant(exchange="barrier")) == pytest.approx(4.5)


def test_launches_bound_small_steps_unless_they_are_replayed() -> None:
    script = Scenario(compute_ms_per_sample=0.1, launch_ms=9.0)
    assert _step_ms(script) == pytest.approx(9.0)
    assert _step_ms(script, batch=200) == pytest.approx(10.0)
    assert _step_ms(script, Variant(captured=True)) == pytest.approx(5.0)


def test_synchronised_batch_norm_a_layout_and_threads_have_their_costs() -> None:
    script = Scenario(batch_norm_ms=2.0, layout_ms={"channels_last": 1.5}, contention_ms=4.0)
    plain = Variant(synchronised_batch_norm=False)
    assert _step_ms(script, batch_norm="synchronised") == pytest.approx(6.5)
    assert _step_ms(script, plain, batch_norm="synchronised") == pytest.approx(4.5)
    assert _step_ms(script, layout="channels_last") == pytest.approx(6.0)
    assert _step_ms(script, Variant(threads=1)) == pytest.approx(0.5)


def test_repeats_and_ablations_draw_noise_of_their_own() -> None:
    script = Scenario(process_noise=0.05)
    found = [_ranks(script), _ranks(script, Variant(input="replayed"))]
    first, other = (ranks[0].step_ms[0] for ranks in found)
    assert first != other
    assert [r.step_ms[0] for r in found[0]] == [first, first]


def test_what_makes_no_sense_is_refused() -> None:
    asked = plan(HOST, framework="simulated", devices=1)
    reason = Simulated(Scenario()).refusal_reason(
        Variant(exchange="none"), Workload(name="digits"), asked
    )
    assert reason == "one device exchanges no gradients"
