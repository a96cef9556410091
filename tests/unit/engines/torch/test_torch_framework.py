"""Plans that PyTorch refuses, with the reason and the next step."""

from __future__ import annotations

import pytest

from made import machine, plan
from nfold.core.workload import Workload
from nfold.engines.torch.framework import TorchFramework

HOST = machine(cores=4)
DIGITS = Workload.parse("digits")


@pytest.mark.parametrize("input_", ["loader", "resident"])
@pytest.mark.parametrize("augment", [None, "cpu", "device"])
def test_resident_images_are_not_augmented_on_the_cpu(input_: str, augment: str | None) -> None:
    reason = TorchFramework().unsupported_reason(
        DIGITS, plan(HOST, input=input_, augment=augment), HOST
    )
    if (input_, augment) == ("resident", "cpu"):
        assert reason is not None
        assert "--augment device" in reason
    else:
        assert reason is None


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"accumulate": 2}, None),
        ({"accumulate": 2, "strategy": "nfold", "batch_norm": "synchronised"}, None),
        ({"memory": "fit"}, "only to a script with nfold.Run"),
        ({"optimizer_state": "sharded"}, "only to a script with nfold.Run"),
        ({"strategy": "ddp", "exchange": "bf16"}, "--strategy nfold"),
        ({"strategy": "nfold", "exchange": "bf16"}, None),
        ({"strategy": "dp", "exchange": "bf16"}, "no exchange to compress"),
        ({"strategy": "ddp", "batch_norm": "synchronised"}, None),
        ({"strategy": "nfold", "batch_norm": "synchronised"}, None),
        ({"strategy": "dp", "batch_norm": "synchronised"}, "threads of one process"),
    ],
)
def test_how_gradients_are_exchanged(changes: dict[str, object], expected: str | None) -> None:
    reason = TorchFramework().unsupported_reason(
        DIGITS, plan(HOST, devices=2, device="cpu", **changes), HOST
    )
    assert (reason is None) if expected is None else (expected in str(reason))
