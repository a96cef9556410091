"""Runs of unmodified scripts in real processes on CPU devices."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch.distributed as dist

import launched
from integration.scripts.fsdp2 import LAYERS, WIDTH
from integration.scripts.own_batches import SLOW_S
from integration.scripts.somebodys_ddp import LONG_S, OFTEN, SHORT_S, SLOW_RANK_S
from nfold.core.measurement import Measurement, RankSamples, Window
from nfold.core.plan import Plan
from nfold.core.script_profile import ReplayHints
from nfold.core.variant import Variant
from nfold.core.workload import Workload
from nfold.explain.advice.pytorch import busiest_gap, gap_locations
from nfold.explain.design import Trial
from nfold.explain.metrics import equalize_epoch_gaps
from nfold.explain.periodic import find_periodic_work, without_affected_steps
from nfold.launch.handoff import HandoffFolder
from nfold.launch.workload_run import run, split_by_variant
from nfold.telemetry.machine_inspection import inspect_machine
from repeated import repeated
from warm_runs import warm_options

pytestmark = pytest.mark.integration
SCRIPT = str(Path(__file__).parent / "scripts" / "somebodys_ddp.py")
FSDP2 = str(Path(__file__).parent / "scripts" / "fsdp2.py")
FSDP2_REMOVED = Path(__file__).parent / "scripts" / "fsdp2_removed.py"
GENERATED = str(Path(__file__).parent / "scripts" / "generated_batches.py")
OWN_BATCHES = str(Path(__file__).parent / "scripts" / "own_batches.py")


def _measured(
    tmp_path: Path,
    wish: str,
    variant: Variant | None = None,
    devices: int = 2,
    script: str = SCRIPT,
    hints: ReplayHints | None = None,
    variants: tuple[Variant, ...] = (),
    **changes: Any,
) -> tuple[Measurement, HandoffFolder]:
    host = inspect_machine()
    if host.cores < devices:
        pytest.skip("a CPU device needs a core of its own")
    said = {"steps": 20, "warmup_steps": 4, "strategy": "ddp" if devices > 1 else "single"}
    plan = Plan(device="cpu", devices=devices, cores_per_device=1, **{**said, **changes})
    workload = Workload.from_script(script, wish)
    options = warm_options(tmp_path, replay_hints=hints or ReplayHints())
    found = run(
        workload, plan, variant, machine=host, options=options, interleaved_variants=variants
    )
    assert found.folder is not None
    return found, HandoffFolder(tmp_path / found.folder)


def _place(line: str, script: str = SCRIPT) -> str:
    """Return ``file:line`` of the first line of a script that starts with ``line``."""
    lines = [text.strip() for text in Path(script).read_text().splitlines()]
    number = next(at for at, text in enumerate(lines, start=1) if text.startswith(line))
    return f"{Path(script).name}:{number}"


def _steps_of(window: Window) -> range:
    return range(window.first_step, window.first_step + window.steps)


def _first_step_ms(rank: RankSamples) -> list[float]:
    """Return the milliseconds of the first step of every epoch."""
    return [ms[0] for window, ms in rank.windows_with_step_times() if window.epoch_gap is not None]


def test_script_stops_after_its_steps_and_has_a_profile(tmp_path: Path) -> None:
    found, folder = _measured(tmp_path, "usual")
    assert found.status == "ok", found.cause
    assert str(found.workload) == f"{SCRIPT} usual"
    assert [len(rank.step_ms) for rank in found.ranks] == [20, 20]
    assert [sum(w.samples for w in rank.windows) for rank in found.ranks] == [160, 160]
    assert len({rank.parameter_checksum for rank in found.ranks}) == 1
    assert not {"same_samples", "parameters_differ"} & {caveat.kind for caveat in found.warnings}
    assert "terminal 30 100\n" in folder.rank_log(0).read_text()
    # Nothing of the script ran after its last step.
    assert "finally" not in folder.rank_log(0).read_text()
    seen = folder.reports.read_profiles()
    assert [(one.rank, one.world_size) for one in seen] == [(0, 2), (1, 2)]
    assert {one.parallel for one in seen} == {"ddp"}
    assert seen[0].loader is not None
    assert (seen[0].loader.shards_dataset, seen[0].global_batch_size) == (True, 16)
    assert str(seen[0].most_frequent_line("step")).endswith(_place("optimizer.step()"))


@repeated
def test_ranks_without_exchange_do_not_wait_for_a_slow_rank(tmp_path: Path) -> None:
    found, _ = _measured(tmp_path, "slow", Variant(input="replayed", exchange="none"))
    assert found.status == "ok", found.cause
    first, second = (median(rank.step_ms) for rank in found.ranks)
    assert second >= 1e3 * SLOW_RANK_S
    assert first < second / 2


@repeated
def test_a_slow_rank_is_named_though_the_others_wait_for_it(tmp_path: Path) -> None:
    found, _ = _measured(tmp_path, "slower")
    assert found.status == "ok", found.cause
    texts = {caveat.kind: caveat.text for caveat in found.warnings}
    assert texts["slow_rank"].startswith("rank 1 computes ")


@repeated
def test_work_of_rank_0_after_some_steps_is_found(tmp_path: Path) -> None:
    """Rank 1 waits in the following step, and the clock of rank 0 shows the delay of both."""
    variants = (Variant(), Variant(input="replayed"))
    whole, _ = _measured(tmp_path, "logs", variants=variants, steps=40)
    assert whole.status == "ok", whole.cause
    members = {
        Trial(plan=one.plan, variant=one.variant or Variant()): one
        for one in split_by_variant(whole, variants)
    }
    found = find_periodic_work(members)
    assert len(found) == 2
    for trial, measured in members.items():
        assert len(found[trial].events) == 1
        (kind,) = found[trial].events
        # What comes at the end of a pass lies between two, and is none of these.
        assert OFTEN <= 1.001 / kind.rate < 1.5 * OFTEN
        assert kind.cost_ms > 1e3 * SHORT_S / 2
        assert {step % OFTEN for step in found[trial].affected_steps} == {0}
        assert len(found[trial].affected_steps) > found[trial].steps // OFTEN / 2
        kept = without_affected_steps(measured, found[trial])
        for rank, rest in zip(measured.ranks, kept.ranks, strict=True):
            timed = [step for window in rank.windows for step in _steps_of(window)]
            others = [ms for step, ms in zip(timed, rank.step_ms, strict=True) if step % OFTEN]
            assert 0 < len(others) < len(timed)
            assert list(rest.step_ms) == others
    logs = busiest_gap(gap_locations(whole), "after some steps")
    assert logs is not None
    assert logs.rank == 0
    assert logs.location.location.endswith(_place("log()"))


@repeated
def test_work_of_rank_0_after_each_pass_is_an_epoch_boundary(
    tmp_path: Path,
) -> None:
    """Rank 1 has begun the next pass, and waits in its first step."""
    found, _ = _measured(tmp_path, "saves", steps=40)
    assert found.status == "ok", found.cause
    assert median(_first_step_ms(found.ranks[1])) > 1e3 * SHORT_S / 2
    for rank in equalize_epoch_gaps(found).ranks:
        assert median(_first_step_ms(rank)) < 1e3 * SHORT_S / 2
        ends = [window.epoch_gap.seconds for window in rank.windows if window.epoch_gap is not None]
        assert len(ends) >= 3
        assert min(ends) > SHORT_S / 2
    saves = busiest_gap(gap_locations(found), "between passes")
    assert saves is not None
    assert saves.rank == 0
    assert saves.location.location.endswith(_place("save()"))
    assert saves.location.callee == "save()"


def test_slots_before_a_failure_are_kept(tmp_path: Path) -> None:
    """Steps: 4 of warm-up, 5 of a cycle, 4 of settling, 3 of the second slot."""
    variants = (Variant(), Variant(input="replayed"))
    whole, _ = _measured(tmp_path, "fails16", variants=variants)
    assert whole.status == "crashed"
    real, replayed = split_by_variant(whole, variants)
    assert (real.status, replayed.status) == ("ok", "crashed")
    assert [len(rank.step_ms) for rank in real.ranks] == [5, 5]
    assert real.cause is not None
    assert "accuracy" in real.cause.text


@pytest.mark.slow
def test_fp16_communication_keeps_ranks_equal(tmp_path: Path) -> None:
    variants = (Variant(), Variant(gradient_compression="fp16"))
    found, _ = _measured(tmp_path, "usual", steps=10, variants=variants)
    assert found.status == "ok", found.cause
    assert len({rank.parameter_checksum for rank in found.ranks}) == 1


def test_independent_ranks_have_their_own_worlds(tmp_path: Path) -> None:
    found, folder = _measured(tmp_path, "usual", Variant(independent=True))
    assert found.status == "ok", found.cause
    assert [(one.rank, one.world_size) for one in folder.reports.read_profiles()] == [
        (0, 1),
        (1, 1),
    ]
    # Each is the first of its own world, whose part of the data is the whole.
    assert found.ranks[0].sample_hashes == found.ranks[1].sample_hashes != ()
    assert "same_samples" not in {caveat.kind for caveat in found.warnings}


def test_barrier_keeps_ranks_together(tmp_path: Path) -> None:
    slow, _ = _measured(tmp_path, "slow", Variant(input="replayed", exchange="barrier"))
    assert slow.status == "ok", slow.cause
    assert min(median(rank.step_ms) for rank in slow.ranks) > 1e3 * SLOW_RANK_S / 2


@pytest.mark.slow
def test_equal_samples_are_found(tmp_path: Path) -> None:
    same, _ = _measured(tmp_path, "same", steps=10)
    assert "same_samples" in {caveat.kind for caveat in same.warnings}


def test_script_without_gradient_exchange_is_detected(tmp_path: Path) -> None:
    found, _ = _measured(tmp_path, "forgets", steps=10)
    assert found.status == "ok", found.cause
    kinds = {caveat.kind for caveat in found.warnings}
    assert "parameters_differ" in kinds
    assert "same_samples" not in kinds


@pytest.mark.parametrize(
    ("wish", "kind", "told"),
    [
        ("perturbs", "rounded_apart", "by rounding"),
        pytest.param(
            *("noisy", "parameters_differ", "each rank changes them in its own way"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *("beside", "parameters_differ", "gradients were not exchanged"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_difference_of_parameters_between_ranks(
    tmp_path: Path, wish: str, kind: str, told: str
) -> None:
    found, _ = _measured(tmp_path, wish, steps=10)
    assert found.status == "ok", found.cause
    texts = {caveat.kind: caveat.text for caveat in found.warnings}
    assert told in texts[kind]
    assert len({"rounded_apart", "parameters_differ"} & texts.keys()) == 1


def test_short_or_failing_script_is_reported(tmp_path: Path) -> None:
    short, _ = _measured(tmp_path, "short", devices=1)
    assert short.status == "unsupported"
    assert short.cause is not None
    assert short.cause.step == 7
    assert "exit code 0 after 7 optimizer steps" in short.cause.text
    fails, folder = _measured(tmp_path, "fails", devices=1)
    assert fails.cause is not None
    assert fails.cause.text.startswith("KeyError: 'accuracy' (")
    assert _place('raise KeyError("accuracy")') in fails.cause.text
    assert fails.cause.step == 3
    assert "finally 3" in folder.rank_log(0).read_text()


def test_refusal_is_reported_if_cleanup_fails(tmp_path: Path) -> None:
    found, _ = _measured(tmp_path, "unbatched", devices=1, batch=16)
    assert found.status == "unsupported"
    assert found.cause is not None
    assert found.cause.text.startswith("batch size 16 per rank")


def test_truncated_passes_are_scaled(tmp_path: Path) -> None:
    """A pass is truncated to 3 of the 8 batches of a rank."""
    found, _ = _measured(tmp_path, "usual", Variant(batches_per_epoch=3), steps=9, warmup_steps=3)
    assert found.status == "ok", found.cause
    for rank in found.ranks:
        ends = [window.epoch_gap for window in rank.windows if window.epoch_gap is not None]
        assert [end.steps for end in ends] == [8, 8, 8]
        assert all(end.seconds > 0 for end in ends)


@pytest.mark.slow
def test_ranks_agree_to_skip_a_second_validation(tmp_path: Path) -> None:
    cut = Variant(batches_per_epoch=3)
    found, _ = _measured(tmp_path, "validates", cut, steps=9, warmup_steps=3)
    assert found.status == "ok", found.cause
    assert [len(rank.step_ms) for rank in found.ranks] == [3, 3]
    for rank in found.ranks:
        (end,) = [window.epoch_gap for window in rank.windows if window.epoch_gap is not None]
        assert end.steps == 8
    assert found.ranks[0].windows[0].epoch_gap is not None
    assert found.ranks[0].windows[0].epoch_gap.seconds >= LONG_S


def test_replicas_exchange_before_every_step(tmp_path: Path) -> None:
    """The group of nfold is hidden: the script sees a world of one rank."""
    late = Variant(independent=True, exchange_after_backward=True)
    found, folder = _measured(tmp_path, "usual", late)
    assert found.status == "ok", found.cause
    assert [len(rank.step_ms) for rank in found.ranks] == [20, 20]
    assert [one.world_size for one in folder.reports.read_profiles()] == [1, 1]


@pytest.mark.slow(parts=8)
@repeated
def test_batches_of_a_generator_are_replayed(tmp_path: Path) -> None:
    """Needs replay hints: without them the generator already runs when it is found."""
    real, folder = _measured(tmp_path, "", script=GENERATED)
    assert real.status == "ok", real.cause
    first, other = folder.reports.read_profiles()
    maker = first.batch_function
    assert maker == other.batch_function
    assert maker is not None
    assert maker.defined_at.endswith(_place("def batches(split: str)", GENERATED))
    assert maker.function_keys == (f"{maker.defined_at} batches",)
    replayed = Variant(input="replayed")
    again, _ = _measured(tmp_path, "", replayed, script=GENERATED, hints=first.replay_hints)
    assert again.status == "ok", again.cause
    slow, fast = (median(found.ranks[0].step_ms) for found in (real, again))
    assert slow > 1e3 * SLOW_S
    assert fast < slow / 2
    untold, _ = _measured(tmp_path, "", replayed, script=GENERATED)
    assert untold.status == "unsupported"


@pytest.mark.slow(parts=8)
@repeated
def test_batches_of_a_function_are_replayed(tmp_path: Path) -> None:
    real, folder = _measured(tmp_path, "", script=OWN_BATCHES)
    profiles = folder.reports.read_profiles()
    replayed, hints = Variant(input="replayed"), profiles[0].replay_hints
    again, _ = _measured(tmp_path, "", replayed, script=OWN_BATCHES, hints=hints)
    assert (real.status, again.status) == ("ok", "ok"), (real.cause, again.cause)
    for seen in profiles:
        assert seen.loader is None
        assert seen.batch_function is not None
        assert seen.batch_function.names == ("get_batch",)
        assert seen.batch_function.defined_at.endswith(
            _place("def get_batch(split: str)", OWN_BATCHES)
        )
        assert (seen.accumulation, seen.gradient_exchanges) == (2, 2)
    slow, fast = (median(found.ranks[0].step_ms) for found in (real, again))
    assert slow > 2 * 1e3 * SLOW_S
    assert fast < slow / 2


def test_collectives_of_fsdp2_are_counted_under_the_names_of_this_pytorch(tmp_path: Path) -> None:
    """Each layer gathers its shards in forward and backward, and scatters its gradients."""
    found, folder = _measured(tmp_path, "", script=FSDP2, steps=10)
    assert found.status == "ok", found.cause
    renamed = hasattr(dist, "all_gather_single")  # in PyTorch 2.13
    gather = "all_gather_single" if renamed else "all_gather_into_tensor"
    scatter = "reduce_scatter_single" if renamed else "reduce_scatter_tensor"
    layer_bytes = 4 * WIDTH * WIDTH
    for seen in folder.reports.read_profiles():
        assert seen.parallel == "fsdp"
        assert {c.name: (c.per_step, c.bytes_per_step) for c in seen.collectives} == {
            gather: (2 * LAYERS, 2 * LAYERS * layer_bytes / 2),
            scatter: (LAYERS, LAYERS * layer_bytes),
        }


@pytest.mark.slow
def test_a_sharded_script_is_not_measured_without_communication(tmp_path: Path) -> None:
    found, _ = _measured(tmp_path, "", Variant(exchange="none"), script=FSDP2)
    assert found.status == "unsupported"
    assert found.cause is not None
    assert "sharded" in found.cause.text


@pytest.mark.slow(parts=8)
def test_collectives_of_fsdp2_can_be_removed(tmp_path: Path) -> None:
    launched.launch(FSDP2_REMOVED, 2, str(tmp_path))
    shard = (WIDTH // 2, WIDTH)
    assert (tmp_path / "shapes").read_text() == repr([shard] * LAYERS)
