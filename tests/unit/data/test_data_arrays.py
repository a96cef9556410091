from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from made import arrays
from nfold.core.errors import DataCorrupt
from nfold.data.arrays import assemble, channel_statistics, check_labels, limit_test


def test_channel_statistics_are_those_of_every_channel() -> None:
    images = np.random.default_rng(0).integers(0, 256, (7, 5, 4, 3), dtype=np.uint8)
    mean, std = channel_statistics(images)
    assert mean == pytest.approx(images.reshape(-1, 3).mean(axis=0))
    assert std == pytest.approx(images.reshape(-1, 3).std(axis=0))


def test_statistics_are_of_training_images_only() -> None:
    dark, bright = np.zeros((2, 1, 1, 1), np.uint8), np.full((2, 1, 1, 1), 255, np.uint8)
    labels = np.zeros(2, np.int64)
    assert assemble("made", 1, train=(dark, labels), test=(bright, labels)).mean == (0.0,)


@pytest.mark.parametrize("wrong", [-1, 10])
def test_a_label_out_of_range_is_named_by_file_and_row(wrong: int) -> None:
    with pytest.raises(DataCorrupt, match=rf"a\.bin: row 2 has the label {wrong}, not 0 to 9"):
        check_labels(Path("a.bin"), np.array([0, 9, wrong, 3]), 10)


def test_labels_in_range_pass() -> None:
    check_labels(Path("a.bin"), np.array([0, 9], np.uint8), 10)


def test_fewer_test_samples_leave_the_training_set_as_it_is() -> None:
    whole = arrays(40)
    part = limit_test(whole, 5)
    assert len(part.test_images) == len(part.test_labels) == 5
    assert part.train_images is whole.train_images
    assert limit_test(whole, 0) is whole
