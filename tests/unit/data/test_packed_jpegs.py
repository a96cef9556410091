"""Both decoders give the same bytes, at every scale."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from nfold.core.errors import ExtraMissing
from nfold.data import packed_jpegs
from nfold.data.packed_jpegs import decode_jpeg, verified_size
from photos import jpeg


@pytest.mark.parametrize("size", [(64, 64), (37, 101), (500, 333)])
@pytest.mark.parametrize("reduction", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_pillow_and_simplejpeg_agree(
    monkeypatch: pytest.MonkeyPatch, size: tuple[int, int], reduction: int, mode: str
) -> None:
    encoded = np.frombuffer(jpeg(*size, mode=mode), np.uint8)
    here = decode_jpeg(encoded, *size, reduction)
    assert here.shape == (-(-size[0] // reduction), -(-size[1] // reduction), 3)
    monkeypatch.setattr(packed_jpegs, "simplejpeg", None)
    np.testing.assert_array_equal(decode_jpeg(encoded, *size, reduction), here)


def test_the_size_is_height_and_width() -> None:
    assert verified_size(jpeg(30, 50)) == (30, 50)


def test_a_huge_image_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_jpegs, "MAX_PIXELS", 100)
    with pytest.raises(ValueError, match="50 × 30, over 100 pixels"):
        verified_size(jpeg(30, 50))


def test_without_pillow_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = jpeg(30, 50)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ExtraMissing, match=r"nfold\[images\]"):
        verified_size(encoded)
