"""What the samples and the parameters of all ranks show about a training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from nfold.core.measurement import ParameterPart, ParameterState, RankSamples
from nfold.launch.training_checks import (
    AUGMENTED_COPIES,
    OUT_OF_STEP,
    PARAMETERS_DIFFER,
    REPEATED_SAMPLES,
    SAME_ORDER,
    SAME_RANDOM_NUMBERS,
    SAME_SAMPLES,
    data_sets_differ,
    training_caveats,
)

SAMPLES = ((64, "0f"),)


def rank(number: int, **more: Any) -> RankSamples:
    return RankSamples(rank=number, device="cpu", **more)


def state(step: int, parts: Mapping[str, float]) -> ParameterState:
    return ParameterState(
        step=step,
        parts=tuple(ParameterPart(name=n, checksum=str(v), sample=(v,)) for n, v in parts.items()),
    )


def trained(
    begin: Mapping[str, float], end: Mapping[str, float], *, exchanged: bool = False
) -> dict[str, Any]:
    return {
        "parameter_checksum": str(end),
        "parameter_sample": tuple(end.values()) if exchanged else (),
        "parameter_states": (state(0, begin), state(50, end)),
    }


def kinds(*ranks: RankSamples) -> set[str]:
    return {caveat.kind for caveat in training_caveats(ranks)}


def text(*ranks: RankSamples) -> str:
    (caveat,) = training_caveats(ranks)
    assert caveat.kind == PARAMETERS_DIFFER
    return caveat.text


BEGIN = {"backbone.0": 1.0, "backbone.1": 2.0, "head.0": 3.0}


def test_equal_parameters_are_no_error() -> None:
    end = {"backbone.0": 1.5, "backbone.1": 2.5, "head.0": 3.5}
    assert not kinds(rank(0, **trained(BEGIN, end)), rank(1, **trained(BEGIN, end)))


def test_a_part_whose_gradients_are_not_exchanged_is_named() -> None:
    one = trained({"head.0": 3.0}, {"backbone.0": 1.1, "backbone.1": 2.1, "head.0": 3.5})
    other = trained({"head.0": 3.0}, {"backbone.0": 1.2, "backbone.1": 2.2, "head.0": 3.5})
    found = text(rank(0, **one), rank(1, **other))
    assert found.startswith("gradients of backbone are not exchanged")
    assert "after step 50" in found
    assert "those of head do not" in found


def test_a_part_that_became_trainable_later_has_its_step() -> None:
    def later(value: float) -> dict[str, Any]:
        head = ParameterPart(name="head.0", checksum="a", sample=(3.5,))
        thawed = ParameterPart(
            name="backbone.0", checksum=str(value), sample=(value,), trained_from=12
        )
        end = ParameterState(step=50, parts=(head, thawed))
        begin = state(0, {"head.0": 3.0, "backbone.0": 1.0})
        return {"parameter_checksum": str(value), "parameter_states": (begin, end)}

    found = text(rank(0, **later(1.1)), rank(1, **later(1.2)))
    assert "backbone are not exchanged" in found
    assert "from step 12 on" in found


def test_a_frozen_part_is_not_taken_for_one_that_is_exchanged() -> None:
    one = trained(BEGIN, {"backbone.0": 1.0, "backbone.1": 2.0, "head.0": 3.5})
    other = trained(BEGIN, {"backbone.0": 1.0, "backbone.1": 2.0, "head.0": 3.6})
    assert "gradients were not exchanged" in text(rank(0, **one), rank(1, **other))


def test_initial_weights_that_are_not_broadcast() -> None:
    others = {"backbone.0": 1.0, "backbone.1": 2.0, "head.0": 9.0}
    one = trained(BEGIN, {"backbone.0": 1.5, "backbone.1": 2.5, "head.0": 3.5}, exchanged=True)
    other = trained(others, {"backbone.0": 1.6, "backbone.1": 2.6, "head.0": 9.5}, exchanged=True)
    assert text(rank(0, **one), rank(1, **other)).startswith("initial weights of head.0 differ")


def test_parameters_that_a_first_step_perturbs_differ_by_rounding() -> None:
    """Sharpness-aware minimisation moves the parameters of each rank before its optimizer steps."""
    moved = {name: value + 0.1 for name, value in BEGIN.items()}
    one = trained(BEGIN, {"backbone.0": 1.5, "backbone.1": 2.5, "head.0": 3.5}, exchanged=True)
    end = {"backbone.0": 1.5, "backbone.1": 2.5, "head.0": 3.5 + 1e-7}
    other = trained(moved, end, exchanged=True)
    assert kinds(rank(0, **one), rank(1, **other)) == {"rounded_apart"}


def test_a_rank_that_skips_batches_is_out_of_step() -> None:
    def skipped(number: int, batches: int | None, epoch: int | None = 250) -> RankSamples:
        return rank(number, batches_per_epoch=epoch, skipped_batches=batches)

    (caveat,) = training_caveats([skipped(0, 0), skipped(1, 2)])
    assert caveat.kind == OUT_OF_STEP
    assert "0 on rank 0 and 2 on rank 1" in caveat.text
    assert "ends its epoch 2 steps early" in caveat.text
    assert not kinds(skipped(0, 1), skipped(1, 1))
    assert not kinds(skipped(0, 0), skipped(1, None))
    assert not kinds(skipped(0, 0, None), skipped(1, 1, None))


def test_same_samples_with_the_same_contents_are_an_error() -> None:
    same = {"sample_hashes": SAMPLES, "batch_hashes": ("a", "b")}
    assert kinds(rank(0, **same), rank(1, **same)) == {SAME_SAMPLES}


def test_batches_that_all_ranks_make_alike() -> None:
    batches = tuple("abcdefgh")
    assert kinds(rank(0, input_hashes=batches), rank(1, input_hashes=batches)) == {SAME_SAMPLES}
    synthetic = ("a",) * 8
    assert not kinds(rank(0, input_hashes=synthetic), rank(1, input_hashes=synthetic))


def test_random_numbers_that_all_ranks_draw_alike() -> None:
    one, other, constant = ("a", "b", "c"), ("a", "b", "d"), ("a", "a")
    found = kinds(rank(0, generator_states=one), rank(1, generator_states=one))
    assert found == {SAME_RANDOM_NUMBERS}
    assert not kinds(rank(0, generator_states=one), rank(1, generator_states=other))
    assert not kinds(rank(0, generator_states=constant), rank(1, generator_states=constant))
    new_epoch = ("a", "a", "b", "b")
    assert not kinds(rank(0, generator_states=new_epoch), rank(1, generator_states=new_epoch))
    assert not kinds(rank(0), rank(1))
    assert not kinds(rank(0, generator_states=one))


def test_same_samples_with_other_augmentation_may_be_intended() -> None:
    one = {"sample_hashes": SAMPLES, "batch_hashes": ("a", "b")}
    other = {"sample_hashes": SAMPLES, "batch_hashes": ("c", "d")}
    assert kinds(rank(0, **one), rank(1, **other)) == {AUGMENTED_COPIES}
    by_the_loop = {**one, "input_hashes": ("e", "f")}
    assert kinds(rank(0, **one, input_hashes=("g", "h")), rank(1, **by_the_loop)) == {
        AUGMENTED_COPIES
    }


@pytest.mark.parametrize(
    ("batches", "repeats"),
    [
        ("aabbccdd", True),  # two workers yield the same samples in turn
        ("abcabc", True),
        ("abcdefgh", False),
        ("aabcdefgh", False),  # one batch came again
        ("aaaaaaaa", False),  # synthetic data: always the same batch
        ("aabb", False),  # too few batches to tell
    ],
)
def test_batches_that_come_again_within_an_epoch(batches: str, repeats: bool) -> None:
    found = kinds(rank(0, batch_hashes=tuple("xyzuvw")), rank(1, batch_hashes=tuple(batches)))
    assert found == ({REPEATED_SAMPLES} if repeats else set())


@pytest.mark.parametrize(
    ("epochs", "same"), [((), False), ((0,), False), ((0, 1, 2), False), ((0, 0), True)]
)
def test_a_sampler_that_shuffles_all_epochs_alike(epochs: tuple[int, ...], same: bool) -> None:
    assert kinds(rank(0, sampler_epochs=epochs)) == ({SAME_ORDER} if same else set())


@pytest.mark.parametrize(
    ("other", "differ"),
    [
        ({1: 10, 2: 20, 3: 30, 9: 90}, False),
        ({1: 11, 2: 20, 3: 33, 4: 44}, True),  # one of them is equal by chance
        ({7: 70, 8: 80}, None),
    ],
)
def test_ranks_with_data_sets_of_their_own(other: dict[int, int], differ: bool | None) -> None:
    own = {1: 10, 2: 20, 3: 30, 4: 40}
    ranks = [
        rank(number, indexed_samples=tuple(samples.items()))
        for number, samples in enumerate((own, other))
    ]
    assert data_sets_differ(ranks) is differ
