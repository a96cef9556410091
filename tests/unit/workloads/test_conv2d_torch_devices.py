"""How a device's images are cut for the way there and back."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from nfold.workloads.conv2d.torch import (
    MAX_CHUNKS,
    MIN_CHUNK_BYTES,
    fastest,
    split_chunks,
)


@pytest.mark.parametrize(
    ("images", "image_bytes", "count"),
    [
        (840, 40_000, 8),
        (210, 40_000, 8),
        (84, 40_000, 3),
        (1, 40_000, 1),
        (1, 2**30, 1),
        (3, 2**30, 3),
        (10**5, 4, 1),
    ],
)
def test_chunks_are_few_and_large_enough(images: int, image_bytes: int, count: int) -> None:
    assert len(split_chunks(images, image_bytes)) == count


@pytest.mark.parametrize("images", [1, 7, 84, 211, 840])
def test_chunks_are_all_images_in_order_and_as_many_each(images: int) -> None:
    found = split_chunks(images, 160_000)
    assert [place for piece in found for place in range(images)[piece]] == list(range(images))
    sizes = [piece.stop - piece.start for piece in found]
    assert max(sizes) - min(sizes) <= 1
    assert len(found) <= MAX_CHUNKS
    assert len(found) == 1 or (min(sizes) + 1) * 160_000 > MIN_CHUNK_BYTES


def named(*names: str) -> dict[str, str]:
    return {name: name for name in names}


@pytest.mark.parametrize(
    ("seconds", "best"),
    [
        ({"cuDNN": 3.0, "tall": 2.0, "wide": 1.0}, "wide"),
        ({"cuDNN": 3.0, "tall": 1.0, "wide": 2.0}, "tall"),
        ({"cuDNN": 1.0, "tall": 2.0, "wide": 2.0}, "cuDNN"),
        ({"cuDNN": 2.0, "tall": 2.0, "wide": 2.0}, "cuDNN"),
        ({"cuDNN": 3.0, "tall": 2.0}, "tall"),
        ({"cuDNN": 3.0}, "cuDNN"),
    ],
)
def test_the_fastest_wins_a_tie_is_the_first_ones_and_an_error_is_out(
    seconds: Mapping[str, float], best: str
) -> None:
    """A way without a time raises."""
    assert fastest(named("cuDNN", "tall", "wide"), seconds.__getitem__)[0] == best


def test_error_of_the_first_candidate_is_raised() -> None:
    with pytest.raises(KeyError, match="cuDNN"):
        fastest(named("cuDNN", "tall"), {"tall": 1.0}.__getitem__)


def test_single_candidate_is_not_timed() -> None:
    times: dict[str, float] = {}
    assert fastest(named("cuDNN"), times.__getitem__)[0] == "cuDNN"
