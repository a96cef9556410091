"""What torch cannot do, each with its reason and the next step."""

from __future__ import annotations

import pytest

from made import machine, plan
from nfold.frameworks.torch.framework import Torch
from nfold.workload import Workload

HOST = machine(cores=4)
DIGITS = Workload.parse("digits")


@pytest.mark.parametrize("input_", ["loader", "resident"])
@pytest.mark.parametrize("augment", [None, "cpu", "device"])
def test_resident_images_are_not_augmented_on_the_cpu(input_: str, augment: str | None) -> None:
    reason = Torch().unsupported(DIGITS, plan(HOST, input=input_, augment=augment), HOST)
    if (input_, augment) == ("resident", "cpu"):
        assert reason is not None
        assert "--augment device" in reason
    else:
        assert reason is None
