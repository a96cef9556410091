"""What to change, in the words of what trains."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

import pytest

from nfold.core.script_profile import (
    CollectiveUse,
    DataLoaderProfile,
    ScriptProfile,
    SourceLocation,
    TrainerKind,
)
from nfold.explain.advice import headline, pytorch, trainers

PLACES: dict[str, tuple[SourceLocation, ...]] = {
    "wrapper": (SourceLocation(line="train.py:8"),),
    "copy": (SourceLocation(line="train.py:12"),),
    "step": (SourceLocation(line="train.py:14"),),
    "trainer": (SourceLocation(line="train.py:3"),),
}
SEEN = ScriptProfile(
    parallel="ddp",
    loader=DataLoaderProfile(batch_size=8, created_at="train.py:7"),
    source_locations=PLACES,
    process_group=True,
)
TRAINERS = [trainer for trainer in trainers.BY_TRAINER if trainer]


def trained(trainer: TrainerKind, **places: SourceLocation) -> ScriptProfile:
    more = {what: (place,) for what, place in places.items()}
    return dataclasses.replace(SEEN, trainer=trainer, source_locations={**PLACES, **more})


@pytest.mark.parametrize(
    ("said", "plain", "told"),
    [
        (
            pytorch.disable_unused_search,
            "train.py:8: DistributedDataParallel(..., find_unused_parameters=False)",
            "train.py:3: TrainingArguments(..., ddp_find_unused_parameters=False)",
        ),
        (
            pytorch.disable_buffer_broadcast,
            "train.py:8: DistributedDataParallel(..., broadcast_buffers=False)",
            "train.py:3: TrainingArguments(..., ddp_broadcast_buffers=False)",
        ),
        (
            lambda seen: pytorch.num_workers_setting(seen, 4),
            "train.py:7: DataLoader(..., num_workers=4)",
            "train.py:3: TrainingArguments(..., dataloader_num_workers=4)",
        ),
        (
            pytorch.increase_batch,
            "train.py:7: a larger batch_size",
            "train.py:3: a larger per_device_train_batch_size",
        ),
        (
            pytorch.use_pinned_copies,
            "train.py:7: DataLoader(..., pin_memory=True) and "
            "train.py:12: .to(device, non_blocking=True)",
            "train.py:3: TrainingArguments(..., dataloader_pin_memory=True) and "
            'train.py:3: TrainingArguments(..., accelerator_config={"non_blocking": True})',
        ),
        (
            lambda seen: pytorch.use_process_per_device(seen, 2),
            "train.py:14: DistributedDataParallel(model), a DistributedSampler, started by nfold "
            "run --devices 2",
            "started by nfold run --devices 2",
        ),
        (
            lambda seen: pytorch.use_process_per_device(dataclasses.replace(seen, loader=None), 2),
            "train.py:14: DistributedDataParallel(model), its own share of the work on each rank, started "
            "by nfold run --devices 2",
            "started by nfold run --devices 2",
        ),
        (
            lambda seen: pytorch.use_process_per_device(
                dataclasses.replace(seen, steps_in_backward=True), 2
            ),
            "train.py:14: dist.all_reduce() of each gradient in its hook, before its optimizer "
            "steps (DistributedDataParallel all-reduces it after that), a DistributedSampler, started by "
            "nfold run --devices 2",
            "started by nfold run --devices 2",
        ),
        (
            headline.describe_parallelism,
            "DDP",
            "DDP by Hugging Face's Trainer",
        ),
    ],
)
def test_a_trainer_is_told_in_its_own_words(
    said: Callable[[ScriptProfile], str], plain: str, told: str
) -> None:
    assert said(SEEN) == plain
    assert said(trained("transformers")) == told


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_script_does_not_wrap_its_model_where_a_trainer_does(trainer: TrainerKind) -> None:
    """Its loader it makes itself, but for Hugging Face's."""
    seen = trained(trainer)
    for said in (pytorch.disable_unused_search, pytorch.disable_buffer_broadcast):
        assert said(seen).startswith("train.py:3: ")
        assert "=False" in said(seen)
        assert "DistributedDataParallel(..." not in said(seen)
    assert pytorch.num_workers_setting(seen, 2).startswith("train.py:3: ") == (
        trainer == "transformers"
    )


def test_where_backwards_are_searched_for_nan_is_told() -> None:
    own = pytorch.disable_anomaly_detection(
        ScriptProfile(source_locations={"anomaly": (SourceLocation(line="train.py:5"),)})
    )
    assert own.startswith("train.py:5: anomaly detection checks every backward operator")
    by_lightning = pytorch.disable_anomaly_detection(trained("lightning"))
    assert by_lightning == "train.py:3: Trainer(..., detect_anomaly=False)"


LIBRARY = SourceLocation(line="train.py:20", package_line="transformers/trainer.py:1914")


@pytest.mark.parametrize(
    ("said", "place", "change"),
    [
        (pytorch.reduce_host_reads, "host_sync", "logging_nan_inf_filter=False"),
        (pytorch.reduce_collectives, "collective", "average_tokens_across_devices=False"),
    ],
)
def test_what_a_library_does_is_not_laid_on_the_line_that_calls_it(
    said: Callable[[ScriptProfile], str], place: str, change: str
) -> None:
    own = said(trained("transformers", **{place: LIBRARY}))
    assert own.startswith(f"train.py:3: TrainingArguments(..., {change}) (transformers/trainer.py")
    other = said(trained("lightning", **{place: LIBRARY}))
    assert re.match(r"train.py:20: transformers/trainer.py:1914 \w+ a value in every step", other)
    users = said(trained("transformers", **{place: SourceLocation(line="train.py:20")}))
    assert re.match(r"train.py:20: (\.item\(\)|a collective) in every step", users)


def test_a_script_s_own_exchange_of_gradients_is_not_left_out() -> None:
    exchange = CollectiveUse(name="all_reduce", per_step=1.0, bytes_per_step=4000.0)
    places = {"collective": SourceLocation(line="train.py:20")}
    for size, expected in (
        (4000, "optimizer step after several batches"),
        (8000, "every 50 steps"),
    ):
        profile = dataclasses.replace(
            trained("", **places), parallel="other", collectives=(exchange,), parameter_bytes=size
        )
        assert expected in pytorch.reduce_collectives(profile)


@pytest.mark.parametrize(
    ("kind", "location"), [("order on cuda", "train.py:40"), ("order on cpu", "train.py:4")]
)
def test_layout_copies_are_located_on_the_device_that_trains(kind: str, location: str) -> None:
    """Else where the model is."""
    places: dict[str, tuple[SourceLocation, ...]] = {
        kind: (SourceLocation(line="train.py:40"),),
        "model": (SourceLocation(line="train.py:4"),),
    }
    profile = dataclasses.replace(SEEN, device="cuda:0", source_locations=places)
    assert pytorch.split_location(pytorch.keep_memory_format(profile))[0] == location


def test_layout_copies_inside_a_library_have_no_advice() -> None:
    inside = SourceLocation(line="train.py:40", package_line="timm/layers/attention.py:80")
    profile = dataclasses.replace(
        SEEN, device="cuda:0", source_locations={"order on cuda": (inside,)}
    )
    assert pytorch.keep_memory_format(profile) == ""
    own = SourceLocation(line="train.py:52")
    both = dataclasses.replace(profile, source_locations={"order on cuda": (inside, own)})
    assert pytorch.split_location(pytorch.keep_memory_format(both))[0] == "train.py:52"


@pytest.mark.parametrize(
    ("advice", "code", "note"),
    [
        ("DataLoader(..., num_workers=4) (why)", "DataLoader(..., num_workers=4)", "(why)"),
        ("f(a, g(b)), or less", "f(a, g(b))", "or less"),
        ("--exchange bf16", "--exchange bf16", ""),
        ("send less often: --batch 4", "", "send less often: --batch 4"),
    ],
)
def test_code_to_type_is_separated_from_words(advice: str, code: str, note: str) -> None:
    assert pytorch.split_code(advice) == (code, note.lstrip(" ,"))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (None, "all ranks and their loader workers are bound to one core: restore"),
        (SourceLocation(line="train.py:3"), "train.py:3: all ranks and their loader workers"),
        (
            SourceLocation(line="train.py:3", package_line="bindlib/core.py:7"),
            "bound to one core by bindlib/core.py:7",
        ),
    ],
)
def test_who_bound_all_ranks_to_one_core_is_named(line: SourceLocation | None, said: str) -> None:
    seen = ScriptProfile(shared_cores=1, source_locations={"affinity": (line,)} if line else {})
    assert said in pytorch.restore_affinity(seen)
