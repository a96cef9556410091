"""Batch norm over two GPUs through NCCL against layers on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from integration.scripts.synchronised import LAYERS
from integration.test_batch_norm import close, launch, reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.integration,
    pytest.mark.timeout(300),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What both ranks found; they fail where the host waits for a GPU."""
    return launch(2, tmp_path_factory.mktemp("world"), "cuda")


@pytest.mark.parametrize("name", LAYERS)
def test_it_is_that_of_the_whole_batch(found: list[dict[str, Any]], name: str) -> None:
    expected = reference(name)
    for key in ("outputs", "of_x"):
        together = torch.cat([rank[name][key] for rank in found])
        assert close(name, together, expected[key])
    for rank in found:
        pairs = zip(rank[name]["gradients"], expected["gradients"], strict=True)
        assert all(close(name, own, whole) for own, whole in pairs)
        assert all(close(name, rank[name]["state"][k], v) for k, v in expected["state"].items())
