"""What a training loop is given of the data."""

import numpy as np

from made import arrays
from nfold.data.arrays import limited


def test_limited_keeps_the_first_training_samples_and_the_whole_test_set() -> None:
    whole = arrays(40)
    part = limited(whole, 10)
    assert np.array_equal(part.train_images, whole.train_images[:10])
    assert len(part.test_labels) == len(whole.test_labels)
    assert limited(whole, 0) is whole
