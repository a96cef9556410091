from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from nfold.core.errors import DataCorrupt
from nfold.data import digits
from nfold.data.arrays import DataSetArrays


@pytest.fixture(scope="module")
def decoded() -> DataSetArrays:
    return digits.decode({})


def test_1437_images_train_and_360_test(decoded: DataSetArrays) -> None:
    assert decoded.train_images.shape == (1437, 8, 8, 1)
    assert decoded.test_images.shape == (360, 8, 8, 1)
    assert (len(decoded.train_labels), len(decoded.test_labels)) == (1437, 360)
    assert decoded.train_images.dtype == np.uint8
    assert decoded.train_labels.dtype == np.int64


def test_0_to_16_became_0_to_255(decoded: DataSetArrays) -> None:
    levels = np.unique(decoded.train_images)
    assert levels.tolist() == [round(level * 255 / 16) for level in range(17)]


def test_every_image_is_in_one_part_and_both_have_all_digits(decoded: DataSetArrays) -> None:
    whole = np.concatenate([decoded.train_labels, decoded.test_labels])
    assert np.bincount(whole).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert np.bincount(decoded.test_labels).min() >= 25


def test_the_file_has_the_values_and_the_order_of_scikit_learn() -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    with np.load(digits.FILE) as stored:
        assert np.array_equal(stored["images"], datasets.load_digits().images)
        assert np.array_equal(stored["labels"], datasets.load_digits().target)


def test_the_statistics_are_the_training_images(decoded: DataSetArrays) -> None:
    assert decoded.mean == pytest.approx((decoded.train_images.mean(),))
    assert decoded.std == pytest.approx((decoded.train_images.std(),))


def test_other_digits_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digits, "SHA256", "0" * 64)
    with pytest.raises(DataCorrupt, match=r"digits.npz: .*expected 0000.*next: "):
        digits.decode({})


@pytest.mark.parametrize("content", [b"", b"not an archive"])
def test_a_damaged_file_is_named(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "digits.npz"
    monkeypatch.setattr(digits, "FILE", file)
    with pytest.raises(DataCorrupt, match=r"digits.npz.*next: pip install"):
        digits.decode({})
    file.write_bytes(content)
    with pytest.raises(DataCorrupt, match=r"digits.npz.*next: pip install"):
        digits.decode({})
