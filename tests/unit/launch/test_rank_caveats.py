"""Each doubt appears where it should, and nowhere else."""

from __future__ import annotations

from typing import Any

import pytest

from nfold.core.measurement import NO_GRADIENT_EXCHANGE, RankSamples, Window
from nfold.core.variant import Variant
from nfold.launch import verdict
from nfold.launch.training_checks import SAME_ORDER


def _rank(rank: int, seconds: float = 1.0, **changes: Any) -> RankSamples:
    windows = tuple(
        Window(start_s=i, seconds=seconds * (1 + 0.001 * (i % 3)), steps=10, samples=100)
        for i in range(20)
    )
    defaults = {
        "windows": windows,
        "step_ms": tuple([100 * seconds] * 20),
        "sample_hashes": ((1000, f"{rank:016x}"),),
        "parameter_checksum": "same",
    }
    return RankSamples(rank=rank, device="cpu", **{**defaults, **changes})


def _kinds(*ranks: RankSamples) -> set[str]:
    return {doubt.kind for doubt in verdict.rank_caveats(ranks)}


def test_a_healthy_run_raises_no_doubt() -> None:
    assert _kinds(_rank(0), _rank(1)) == set()


def test_a_variant_that_changes_the_training_is_checked_for_the_order_of_epochs() -> None:
    """Short epochs are the first to have a second one."""
    same: dict[str, Any] = {"sample_hashes": ((1000, "abc"),), "sampler_epochs": (0, 0)}
    short = Variant(batches_per_epoch=10)
    found = verdict.rank_caveats([_rank(0, **same), _rank(1, **same)], short)
    assert [caveat.kind for caveat in found] == [SAME_ORDER]


def test_ranks_that_were_fed_the_same_samples() -> None:
    same = ((1000, "abc"),)
    assert _kinds(_rank(0, sample_hashes=same), _rank(1, sample_hashes=same)) == {"same_samples"}
    nothing = ((0, "0" * 16),)
    assert not _kinds(_rank(0, sample_hashes=nothing), _rank(1, sample_hashes=nothing))


def test_ranks_that_ended_with_other_parameters() -> None:
    assert _kinds(_rank(0), _rank(1, parameter_checksum="other")) == {"parameters_differ"}


@pytest.mark.parametrize(
    ("mine", "others", "kinds", "told"),
    [
        ((), (), {"parameters_differ"}, NO_GRADIENT_EXCHANGE),
        ((0.5, -1.0), (), {"parameters_differ"}, NO_GRADIENT_EXCHANGE),
        ((0.5, -1.0), (0.5, -1.0 + 1e-7), {"rounded_apart"}, "by rounding (1e-07 of them)"),
        ((0.5, -1.0), (0.5, -1.01), {"parameters_differ"}, "by 1e-02 of them, though gradients"),
    ],
)
def test_by_how_much_parameters_differ(
    mine: tuple[float, ...], others: tuple[float, ...], kinds: set[str], told: str
) -> None:
    ranks = (
        _rank(0, parameter_sample=mine),
        _rank(1, parameter_checksum="other", parameter_sample=others),
    )
    assert _kinds(*ranks) == kinds
    assert told in verdict.rank_caveats(ranks)[0].text


def test_few_windows() -> None:
    assert _kinds(_rank(0, windows=_rank(0).windows[:2])) == {"few_windows"}


def test_a_jump_in_speed() -> None:
    slow = tuple(
        Window(start_s=w.start_s, seconds=w.seconds * (1.5 if i >= 10 else 1), steps=10, samples=1)
        for i, w in enumerate(_rank(0).windows)
    )
    assert _kinds(_rank(0, windows=slow)) == {"drift"}


@pytest.mark.parametrize(("seconds", "flagged"), [(1.05, False), (1.3, True)])
def test_a_slow_rank(seconds: float, flagged: bool) -> None:
    found = _kinds(_rank(0), _rank(1), _rank(2, seconds))
    assert found == ({"slow_rank"} if flagged else set())


def _waiting(rank: int, *waits_s: float) -> RankSamples:
    windows = tuple(
        Window(start_s=i, seconds=1.0, steps=10, samples=100, exchange_wait_s=wait_s)
        for i, wait_s in enumerate(waits_s)
    )
    return _rank(rank, windows=windows)


@pytest.mark.parametrize(
    ("waits_s", "flagged"),
    [
        ([0.6] * 10, True),
        ([0.13] * 10, False),  # 8 % of the step
        ([0.6] * 6 + [0.0] * 4, False),  # not in most windows
    ],
)
def test_a_slow_rank_that_the_others_wait_for(waits_s: list[float], flagged: bool) -> None:
    ranks = [_waiting(0, *waits_s), _waiting(1, *[0.05] * 10)]
    found = [doubt for doubt in verdict.rank_caveats(ranks) if doubt.kind == "slow_rank"]
    assert bool(found) == flagged
    if flagged:
        assert found[0].text.startswith("rank 1 computes 95.00 ms a step before it exchanges")
        assert "the others 40.00 ms" in found[0].text


def test_what_a_rank_noted_itself_is_said_once() -> None:
    note = (("fallback", "not captured"),)
    found = verdict.rank_caveats([_rank(0, caveats=note), _rank(1, caveats=note)])
    assert [doubt.kind for doubt in found] == ["fallback"]
