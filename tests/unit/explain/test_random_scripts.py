"""Scripts drawn at random: whatever was seen of one and whatever it costs, its account adds up."""

from __future__ import annotations

import dataclasses
import random
from typing import Any, get_args

import pytest

from explaining import HOST, script_runner, target
from nfold.core.measurement import FetchStats, Measurement
from nfold.core.plan import Plan
from nfold.core.script_profile import (
    BatchFunction,
    DataLoaderProfile,
    HostToDeviceCopies,
    Parallelism,
    ScriptProfile,
    SourceLocation,
    TraceSummary,
    TrainerKind,
)
from nfold.engines.simulated import Scenario
from nfold.explain.attribution import build_budget
from nfold.explain.cause_costs import remaining_ms
from nfold.explain.experiment import Experiment, ExperimentEvents
from nfold.explain.result.budget import Budget
from nfold.explain.result.view import build_view
from nfold.explain.script_probe import probe_script
from nfold.explain.time_budget import TimeBudget

COSTS = (
    "repeated_ms",
    "exchange_ms",
    "buffers_ms",
    "unused_ms",
    "latency_ms",
    "wrapper_ms",
    "transfer_ms",
    "batch_norm_ms",
    "host_syncs_ms",
    "straggler_ms",
    "random_straggler_ms",
    "contention_ms",
    "crowding_ms",
    "host_ms",
    "launch_ms",
    "epoch_gap_ms",
    "epoch_wait_ms",
    "host_gap_ms",
    "retries_ms",
    "neighbor_retries_ms",
)
OF_SAMPLES = ("load_ms_per_sample", "read_ms_per_sample", "copy_ms_per_sample")
PARALLEL: tuple[Parallelism, ...] = ("none", "dp", "ddp", "ddp", "other", "fsdp")
TRAINERS: tuple[TrainerKind, ...] = get_args(TrainerKind)
PLACES = ("wrapper", "step", "host_sync", "copy", "collective", "threads", "trainer")


def drawn_loader(draw: random.Random) -> DataLoaderProfile:
    return DataLoaderProfile(
        batch_size=100,
        batches_per_epoch=draw.choice([None, 20, 3]),
        dataset_size=draw.choice([None, 2000]),
        sampler="RandomSampler",
        shards_dataset=draw.choice([None, True, False]),
        num_workers=draw.choice([0, 0, 2, 8]),
        prefetch_factor=2,
        pin_memory=draw.random() < 0.5,
        persistent_workers=draw.random() < 0.5,
        length_read_ahead=draw.random() < 0.3,
        created_at=draw.choice([None, "train.py:7"]),
    )


def drawn_trace(draw: random.Random) -> TraceSummary:
    transposing_ms = draw.choice([0.0, 1.0])
    reordering_ms = (draw.choice([0.0, 1.0]),) * 7
    return TraceSummary(
        steps=7, layout_copy_ms=reordering_ms, cudnn_transpose_ms=transposing_ms, device_busy_ms=5.0
    )


def drawn_seen(draw: random.Random) -> ScriptProfile:
    parallel = draw.choice(PARALLEL)
    ranks = parallel in ("ddp", "other", "fsdp")
    accumulation = draw.choice([1, 1, 2, 4])
    inside = draw.choice([None, "transformers/trainer.py:3"])
    maker = BatchFunction(
        names=("get_batch",), defined_at="train.py:5", on_device=draw.random() < 0.5
    )
    loader = drawn_loader(draw) if draw.random() < 0.8 else None
    return ScriptProfile(
        steps=30,
        loader=loader,
        batch_function=draw.choice([None, maker]) if loader is None else None,
        samples_per_step=100.0,
        device=draw.choice(["cuda:0", "cuda:0", "cpu"]),
        parallel=parallel,
        trainer=draw.choice(TRAINERS),
        world_size=2 if ranks else 1,
        process_group=ranks,
        backend=draw.choice(["nccl", "gloo"]) if ranks else None,
        dp_devices=2 if parallel == "dp" else 0,
        accumulation=accumulation,
        gradient_exchanges=draw.choice([1.0, float(accumulation)]),
        broadcast_buffers=draw.random() < 0.5,
        buffers=draw.choice([0, 3]),
        convolutions=draw.choice([0, 5]),
        channels_last=draw.random() < 0.2,
        synchronised_batch_norms=draw.choice([0, 0, 2]),
        find_unused_parameters=draw.random() < 0.4,
        unused_parameter_bytes=draw.choice([0, 100]),
        host_syncs=draw.choice([0.0, 2.0]),
        autocast=draw.choice([None, "fp16"]),
        compiled=draw.random() < 0.2,
        alloc_retries=draw.choice([0.0, 0.0, 1.5]),
        threads=draw.choice([1, 8, 64]),
        copies=HostToDeviceCopies(
            per_step=2.0, bytes_per_step=1e6, pinned_per_step=draw.choice([0.0, 2.0])
        ),
        fetches=draw.choice([None, FetchStats(batches=10, seconds=1.0, waited_s=0.5)]),
        epochs_completed=draw.choice([0, 3]),
        trace=draw.choice([None, drawn_trace(draw)]),
        source_locations={
            what: (SourceLocation(line="train.py:9", package_line=inside),) for what in PLACES
        },
    )


def drawn_costs(draw: random.Random) -> Scenario:
    costs: dict[str, Any] = {}
    for names, sizes in ((COSTS, (0.3, 2.0, 20.0)), (OF_SAMPLES, (0.01, 0.1, 1.0))):
        costs |= {name: draw.choice(sizes) for name in names if draw.random() < 0.35}
    return Scenario(
        layout_ms={"channels_first": draw.choice([0.0, 2.0])},
        launch_ms_compiled={"reduce-overhead": draw.choice([0.0, 5.0])},
        compute_ms_per_sample=draw.choice([0.01, 0.1]),
        samples_per_epoch=2000,
        host_cores=draw.choice([0, 4]),
        same_samples=draw.random() < 0.1,
        can_interleave=draw.random() < 0.5,
        **costs,
    )


def explained(seen: ScriptProfile, costs: Scenario, runs: int, devices: int) -> Budget:
    """After so many runs the time is over."""
    made: list[Measurement] = []
    usual = script_runner(costs)

    def run(*asked: Any, **more: Any) -> Measurement:
        made.append(usual(*asked, **more))
        return made[-1]

    clock = TimeBudget(float(runs), now=lambda: float(len(made)))
    one = Experiment(target(costs, run=run), clock, ExperimentEvents())
    device = seen.device.partition(":")[0]
    place = Plan(framework="simulated", device=device, devices=devices, cores_per_device=8, steps=1)
    design = one.run(probe_script(one, place, None, HOST, lambda _: (seen,)))
    return build_budget("train.py", design, one.results, resamples=5)


@pytest.mark.slow(parts=8)
@pytest.mark.parametrize("seed", range(30))
def test_nothing_falls_between_the_rows_of_any_script(seed: int) -> None:
    draw = random.Random(seed)
    runs = draw.choice([5, 10, 20, 1000])
    found = explained(drawn_seen(draw), drawn_costs(draw), runs, devices=2)
    _check(found)
    missing = found.n_devices.step_ms.value - found.ideal_ms.value
    rest = missing - sum(row.lost_ms.value for row in found.rows)
    if not found.training_errors:
        assert found.not_attributed_ms.value == pytest.approx(rest, abs=1e-6)
    if runs == 1000:
        assert found.not_attributed_ms.value == pytest.approx(0.0, abs=1e-6)


@pytest.mark.slow(parts=8)
@pytest.mark.parametrize("seed", range(100, 115))
def test_nothing_falls_between_the_rows_of_any_script_on_one_device(seed: int) -> None:
    draw = random.Random(seed)
    runs = draw.choice([5, 10, 1000])
    seen = dataclasses.replace(drawn_seen(draw), world_size=1)
    found = explained(seen, drawn_costs(draw), runs, devices=1)
    _check(found)
    assert found.rows == ()
    if found.device_bound is not None:
        lost = sum(max(0.0, row.lost_ms.value) for row in found.one_device_rows)
        rest = remaining_ms(found.n_devices.step_ms.value, lost)
        if seen.trace is None:
            assert found.device_bound.step_ms.value == pytest.approx(rest, abs=1e-6)
        assert found.device_bound.step_ms.value > rest - 1e-6


def _check(found: Budget) -> None:
    view = build_view(found)
    assert view.headline
    assert view.title
    account = found.account
    assert account is not None
    total = sum(row.ms.value for row in account.rows)
    assert total == pytest.approx(account.step_ms.value)
    assert account.step_ms.value == pytest.approx(found.n_devices.step_ms.value)
    assert found.to_json()["schema"] == 1
    assert all(row.fix for row in (*found.rows, *found.one_device_rows))
