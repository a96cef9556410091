"""How a script sends less, in the words of what trains it."""

from __future__ import annotations

import dataclasses

import pytest

from nfold.core.script_profile import CollectiveUse, ScriptProfile, SourceLocation, TrainerKind
from nfold.explain.advice import pytorch, trainers

SEEN = ScriptProfile(
    parallel="ddp",
    backend="nccl",
    parameter_count=10,
    parameter_bytes=40,
    process_group=True,
    source_locations={
        "wrapper": (SourceLocation(line="train.py:8"),),
        "trainer": (SourceLocation(line="train.py:3"),),
    },
)


@pytest.mark.parametrize("trainer", trainers.BY_TRAINER)
@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_half_is_sent_by_a_hook_that_the_backend_has(trainer: TrainerKind, backend: str) -> None:
    seen = dataclasses.replace(SEEN, trainer=trainer, backend=backend)
    half = pytorch.halve_gradient_bytes(seen)
    has = trainer not in ("transformers", "fabric")
    assert bool(half) == has
    assert ("bf16" in half.lower()) == (has and backend == "nccl")
    assert ("fp16" in half.replace("bf16", "").lower()) == (has and backend == "gloo")
    assert (pytorch.reduce_gradient_bytes(seen) == half) == has
    tried = pytorch.reduce_gradient_bytes(seen, half_tried=True)
    assert "send less often" in tried
    assert "no gain" in tried


@pytest.mark.parametrize(
    "otherwise",
    [
        {"comm_hook": "fp16_compress_hook"},
        {"parameter_bytes": 20},
        {"sparse_gradient_bytes": 8},
        {"parallel": "other"},
        {"parallel": "fsdp"},
    ],
)
def test_what_is_half_already_or_has_no_hook_is_not_halved(otherwise: dict[str, object]) -> None:
    seen = dataclasses.replace(SEEN, **otherwise)  # type: ignore[arg-type]  # fields of every type
    assert pytorch.halve_gradient_bytes(seen) == ""
    assert "comm_hook" not in pytorch.reduce_gradient_bytes(seen)


def test_several_wrappers_are_all_told() -> None:
    """Those of a GAN: each sends its own gradients."""
    lines = tuple(SourceLocation(line=f"gan.py:{line}") for line in (27, 26))
    seen = dataclasses.replace(SEEN, source_locations={"wrapper": lines})
    assert pytorch.halve_gradient_bytes(seen).startswith("gan.py:26, gan.py:27: model.register")
    assert pytorch.reduce_gradient_bytes(seen, half_tried=True).startswith(
        "gan.py:26, gan.py:27: send less often"
    )


def test_sparse_gradients_are_told_with_what_dense_ones_would_be() -> None:
    seen = dataclasses.replace(SEEN, sparse_gradient_bytes=9_500_000)
    assert "sparse=False all-reduces 9.50 MB" in pytorch.reduce_gradient_bytes(seen)


@pytest.mark.parametrize(
    ("inside", "told"),
    [
        (
            None,
            "train.py:20: DistributedDataParallel, which all-reduces buckets during backward",
        ),
        ("horovod/torch/optimizer.py:7", "train.py:20: send less"),
    ],
)
def test_gradients_exchanged_by_hand_are_for_ddp_to_send(inside: str | None, told: str) -> None:
    own = SourceLocation(line="train.py:20", package_line=inside)
    by_hand = dataclasses.replace(SEEN, parallel="other", source_locations={"collective": (own,)})
    assert pytorch.reduce_gradient_bytes(by_hand).startswith(told)
    assert "which sends" not in pytorch.reduce_gradient_bytes(SEEN)


def test_a_collective_for_each_gradient_is_counted() -> None:
    """Also where they are sent while backward goes on, a wrapper sends fewer and larger ones."""
    sent = (CollectiveUse(name="all_reduce", per_step=26.0, bytes_per_step=1e6),)
    places: dict[str, tuple[SourceLocation, ...]] = {
        "collective": (SourceLocation(line="train.py:20"),)
    }
    seen = ScriptProfile(parallel="other", world_size=2, collectives=sent, source_locations=places)
    assert (
        "during backward (26 collectives per step here); or send less"
        in pytorch.reduce_gradient_bytes(seen)
    )
