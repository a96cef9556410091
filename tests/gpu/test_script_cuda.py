"""An unmodified script on GPUs."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch.distributed as dist

from integration.scripts.sync_batch_norm import CHANNELS, LAYERS, WAIT_S
from nfold.core.measurement import Measurement
from nfold.core.plan import Plan
from nfold.core.script_profile import ScriptProfile
from nfold.core.variant import Variant
from nfold.core.workload import Workload
from nfold.explain.advice import pytorch
from nfold.launch.handoff import HandoffFolder
from nfold.launch.launch_spec import RunOptions
from nfold.launch.workload_run import run
from nfold.telemetry.machine_inspection import inspect_machine

pytestmark = [pytest.mark.gpu, pytest.mark.integration, pytest.mark.timeout(300)]
HOST = inspect_machine()
one_gpu = pytest.mark.skipif(len(HOST.gpus) < 1, reason="needs a GPU")
two_gpus = pytest.mark.skipif(len(HOST.gpus) < 2, reason="needs two GPUs")
SCRIPT = str(Path(__file__).parent / "scripts" / "user_image_training.py")
SYNC_BATCH_NORM = str(Path(__file__).parents[1] / "integration/scripts/sync_batch_norm.py")
FAULTY = Path(__file__).parents[2] / "benchmarks/diagnosis/scripts"
WITH_TRAINER, MIXED = FAULTY / "with_trainer.py", FAULTY / "mixed_precision.py"
SMALL = FAULTY / "characters.py"


def _measured(
    tmp_path: Path,
    variant: Variant | None = None,
    *arguments: str,
    script: str = SCRIPT,
    **changes: Any,
) -> tuple[Measurement, tuple[ScriptProfile, ...]]:
    fields = {"devices": 1, "strategy": "single", "steps": 30, "warmup_steps": 6, **changes}
    plan = Plan(**{"device": "cuda", "cores_per_device": 1, **fields})
    workload = Workload.from_script(script, *arguments)
    found = run(workload, plan, variant, machine=HOST, options=RunOptions(results=tmp_path))
    assert found.status == "ok", found.cause
    assert {len(rank.step_ms) for rank in found.ranks} == {30}
    return found, HandoffFolder(tmp_path / str(found.folder)).reports.read_profiles()


def _place(line: str) -> str:
    """``file:line`` of a line of the script."""
    pytorch = Path(SCRIPT).read_text().splitlines()
    return f"{Path(SCRIPT).name}:{[text.strip() for text in pytorch].index(line) + 1}"


@one_gpu
def test_copies_and_reads_are_seen_and_resident_batches_are_not_copied(tmp_path: Path) -> None:
    _, (seen,) = _measured(tmp_path)
    assert seen.device == "cuda:0"
    assert (seen.copies.per_step, seen.copies.pinned_per_step) == (2, 2)
    assert seen.copies.bytes_per_step == 64 * (3 * 32 * 32 * 4 + 8)
    assert seen.host_syncs == 1
    assert seen.autocast == seen.precision == "bf16"
    assert seen.channels_last
    assert str(seen.most_frequent_line("host_sync")).endswith(_place("loss.item()"))
    replayed, _ = _measured(tmp_path, Variant(input="replayed"))
    resident, (still,) = _measured(tmp_path, Variant(input="resident"))
    assert still.copies.per_step < 1
    assert resident.ranks[0].data_bytes
    assert not replayed.ranks[0].data_bytes


@pytest.mark.alone
@one_gpu
def test_the_host_need_not_wait_for_what_it_reads(tmp_path: Path) -> None:
    """Of 20 ms of the host and 10 of the device a step, what is read puts one after the other."""
    waits, _ = _measured(tmp_path, Variant(input="resident"), "--slow")
    ahead, _ = _measured(tmp_path, Variant(input="resident", host_syncs=False), "--slow")
    assert median(waits.ranks[0].step_ms) - median(ahead.ranks[0].step_ms) > 5


@two_gpus
def test_one_process_drives_two_gpus_or_sees_only_one(tmp_path: Path) -> None:
    both, (seen,) = _measured(tmp_path, None, "--dp", devices=2, strategy="dp")
    assert (seen.parallel, seen.dp_devices, seen.process_group) == ("dp", 2, False)
    assert both.ranks[0].device.startswith("cuda:0, cuda:1 ")
    _, (alone,) = _measured(tmp_path, Variant(device=1), "--dp", batch=32)
    assert alone.dp_devices == 1
    assert alone.global_batch_size == 32


@two_gpus
@pytest.mark.parametrize(
    "variant",
    [
        None,
        Variant(input="resident", exchange="none"),
        Variant(input="resident", exchange="barrier"),
        Variant(independent=True),
        Variant(broadcast_buffers=False, devices=(1, 0)),
        Variant(gradient_compression="bf16"),
    ],
    ids=str,
)
def test_every_variant_of_ddp_over_nccl(tmp_path: Path, variant: Variant | None) -> None:
    found, seen = _measured(tmp_path, variant, "--ddp", devices=2, strategy="ddp")
    assert len(found.ranks) == len(seen) == 2
    assert {one.parallel for one in seen} == {"ddp"}
    assert {one.backend for one in seen} == {"nccl"}
    world = 1 if variant is not None and variant.independent else 2
    assert {one.world_size for one in seen} == {world}
    if variant is None:
        assert len({rank.parameter_checksum for rank in found.ranks}) == 1


@two_gpus
def test_collectives_of_sync_batch_norm_are_counted_and_removed(tmp_path: Path) -> None:
    """It gathers mean, inverse deviation and count in forward, and adds two sums in backward."""
    ddp: dict[str, Any] = {"script": SYNC_BATCH_NORM, "devices": 2, "strategy": "ddp"}
    whole, seen = _measured(tmp_path, **ddp)
    gather = next(n for n in ("all_gather_single", "all_gather_into_tensor") if hasattr(dist, n))
    for one in seen:
        assert one.synchronised_batch_norms == LAYERS
        assert {c.name: (c.per_step, c.bytes_per_step) for c in one.collectives} == {
            gather: (LAYERS, LAYERS * 4 * (2 * CHANNELS + 1)),
            "all_reduce": (LAYERS, LAYERS * 4 * 2 * CHANNELS),
        }
    assert min(median(rank.step_ms) for rank in whole.ranks) > 1e3 * WAIT_S
    removed, _ = _measured(tmp_path, Variant(exchange="none"), **ddp)
    first, second = (median(rank.step_ms) for rank in removed.ranks)
    assert second > 1e3 * WAIT_S
    assert first < second / 2


@one_gpu
def test_a_trainers_own_settings_are_reported_in_its_terms(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    _, (seen,) = _measured(tmp_path, script=str(WITH_TRAINER))
    assert seen.trainer == "transformers"
    read = seen.most_frequent("host_sync")
    assert read is not None
    assert str(read.package_line).startswith("transformers/trainer.py:")
    made = next(n for n, t in enumerate(WITH_TRAINER.read_text().splitlines(), 1) if "told = " in t)
    assert "logging_nan_inf_filter=False" in pytorch.reduce_host_reads(seen)
    assert pytorch.num_workers_setting(seen, 8).endswith(
        f"with_trainer.py:{made}: TrainingArguments(..., dataloader_num_workers=8)"
    )


@one_gpu
def test_no_rank_waits_for_the_losses_that_a_trainer_reads(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    _, (seen,) = _measured(tmp_path, Variant(host_syncs=False), script=str(WITH_TRAINER))
    assert seen.steps == 30


@one_gpu
def test_convolutions_in_the_order_of_tensor_cores_are_not_reordered(tmp_path: Path) -> None:
    traced = []
    for last in (False, True):
        variant = Variant(channels_last=last, profiler_steps=True)
        _, (seen,) = _measured(tmp_path, variant, script=str(MIXED))
        assert seen.convolutions == 19
        assert seen.trace is not None
        traced.append(seen.trace)
    usual, other = traced
    assert other.cudnn_transpose_ms < usual.cudnn_transpose_ms / 4
    assert max(usual.layout_copy_ms) < usual.cudnn_transpose_ms


@one_gpu
def test_the_model_of_a_script_is_compiled_in_either_mode(tmp_path: Path) -> None:
    arguments, launches = ("--layers=3", "--batch=8"), []
    for mode in ("", "default", "reduce-overhead"):
        variant = Variant(compiled=mode, profiler_steps=True)
        _, (seen,) = _measured(tmp_path, variant, *arguments, script=str(SMALL))
        assert seen.compiled == bool(mode)
        assert seen.trace is not None
        launches.append(seen.trace.launches_per_step)
    usual, fused, _ = launches
    assert fused < 0.9 * usual
