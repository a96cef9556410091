"""Parts of the training loop that need no process."""

import numpy as np
import torch
from torch import nn

from made import arrays
from nfold.data.arrays import limited
from nfold.frameworks.recording import checksum
from nfold.frameworks.torch.loop import contents


def test_a_checksum_sees_every_value_and_no_layout() -> None:
    """A 1 × 1 weight in channels_last has ambiguous strides: its bytes once could not be read."""
    torch.manual_seed(0)
    pointwise = nn.Conv2d(16, 32, 1)
    module = nn.Sequential(pointwise, nn.Conv2d(32, 8, 3))
    first = checksum(contents(module))
    for weight in module.parameters():
        if weight.dim() == 4:
            weight.data = weight.data.contiguous(memory_format=torch.channels_last)
    assert checksum(contents(module)) == first
    with torch.no_grad():
        pointwise.weight[3, 5, 0, 0] += 1e-3
    assert checksum(contents(module)) != first


def test_limited_keeps_the_first_training_samples_and_the_whole_test_set() -> None:
    whole = arrays(40)
    part = limited(whole, 10)
    assert np.array_equal(part.train_images, whole.train_images[:10])
    assert len(part.test_labels) == len(whole.test_labels)
    assert limited(whole, 0) is whole
