"""Augmentation on a GPU equals the CPU's, also in a CUDA graph of another epoch."""

from __future__ import annotations

import pytest
import torch

from made import arrays, task
from nfold.engines.torch.input.dataloader import BatchKeySampler
from nfold.engines.torch.input.device_dataset import ResidentSource
from nfold.engines.torch.input.preprocessing import build_augmentation

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
OPERATIONS = (("crop", 2), ("flip", 0), ("cutout", 3))
SAMPLES = 64


def test_a_captured_augmentation_draws_each_epoch_s_numbers() -> None:
    """Selection from resident data is captured with it."""
    device, host = torch.device("cuda", 0), torch.device("cpu")
    data = arrays(SAMPLES)
    resident = ResidentSource(data, BatchKeySampler(SAMPLES, task(batch=16)), device)
    augment = build_augmentation(OPERATIONS, data, 5, device)
    expected = build_augmentation(OPERATIONS, data, 5, host)
    ids = torch.zeros(16, dtype=torch.int64, device=device)
    epoch = torch.zeros((), dtype=torch.int64, device=device)

    aside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(aside):
        augment(resident.unpack((ids,)).images, ids, epoch)
    aside.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        augmented = augment(resident.unpack((ids,)).images, ids, epoch)

    for now in range(3):
        resident.epoch = now
        for batch in resident:
            ids.copy_(batch.tensors[0])
            epoch.copy_(torch.as_tensor(batch.epoch))
            graph.replay()
            own = batch.tensors[0].cpu()
            images = torch.from_numpy(data.train_images[own.numpy()])
            assert torch.equal(augmented.cpu(), expected(images, own, now))
