"""The input of a training loop, which a layout does not change."""

import numpy as np
import pytest

from made import arrays, machine
from nfold.core.plan import Plan
from nfold.core.workload import Workload
from nfold.data.arrays import limit_training
from nfold.engines.base import Observer, Task
from nfold.engines.torch.trainer import train
from nfold.workloads import info


def test_limited_keeps_the_first_training_samples_and_the_whole_test_set() -> None:
    whole = arrays(40)
    part = limit_training(whole, 10)
    assert np.array_equal(part.train_images, whole.train_images[:10])
    assert len(part.test_labels) == len(whole.test_labels)
    assert limit_training(whole, 0) is whole


def test_a_layout_changes_no_loss() -> None:
    found = []
    for layout in ("channels_first", "channels_last"):
        requested = Plan(device="cpu", devices=1, batch=32, steps=12, warmup_steps=1, layout=layout)
        plan = requested.resolve(machine(), info("digits").defaults)
        task = Task(workload=Workload.parse("digits"), plan=plan, machine=machine())
        found.append(train(task, Observer()))
    first, last = found
    assert first.sample_hashes == last.sample_hashes
    assert len(first.losses) == len(last.losses) > 5
    for one, other in zip(first.losses, last.losses, strict=True):
        assert other == pytest.approx(one, rel=1e-3)
    assert first.losses[-1][1] < 0.9 * first.losses[0][1]
