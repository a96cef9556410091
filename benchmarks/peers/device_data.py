"""The training set on the device as bytes, augmented there a batch at a time."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from job import Job
from torch import Tensor
from torch.nn import functional

from nfold.engines.torch.input.device_dataset import copy_in_chunks


class DeviceData:
    """Images with their borders padded already, labels, and where the next samples are.

    A random crop is a gather from the padded images; a flip gathers the columns backwards. Each
    sample has its own draws.
    """

    def __init__(self, job: Job, device: torch.device) -> None:
        arrays, operations = job.arrays(), dict(job.info.augmentation)
        if set(operations) - {"crop", "flip"}:
            raise ValueError(f"the peers have only crop and flip, not {operations}")
        self._job = job
        self._device = device
        self._padding = operations.get("crop", 0)
        self._flips = "flip" in operations
        self._places = torch.arange(arrays.train_images.shape[1], device=device)
        by = self._padding
        images = copy_in_chunks(arrays.train_images, device)
        self._images = functional.pad(images, (0, 0, by, by, by, by))
        self._labels = copy_in_chunks(arrays.train_labels, device)
        self._mean = torch.tensor(arrays.mean, device=device)
        self._inverse_std = 1 / torch.tensor(arrays.std, device=device)

    def __len__(self) -> int:
        return len(self._labels)

    def orders(self) -> Iterator[Tensor]:
        """The samples [share] of this rank, step by step without end; last ones are left out."""
        job, steps = self._job, len(self) // self._job.batch
        drawing = torch.Generator(self._device).manual_seed(0)
        for _ in itertools.count():
            order = torch.randperm(len(self), generator=drawing, device=self._device)
            parts = order[: steps * job.batch].view(steps, job.world_size, job.share)
            yield from parts[:, job.rank]

    def draws(self) -> Tensor:
        """Uniform numbers for one step: float [3, share]."""
        return torch.rand(3, self._job.share, device=self._device)

    def select(self, ids: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
        """Images [n, c, h, w] augmented and normalised, laid out channels last; labels [n]."""
        images = self._gathered(ids, draws).float()
        normal = (images - self._mean) * self._inverse_std
        return normal.permute(0, 3, 1, 2), self._labels.index_select(0, ids)

    def _gathered(self, ids: Tensor, draws: Tensor) -> Tensor:
        if not (self._padding or self._flips):
            return self._images.index_select(0, ids)
        down, right = (draws[:2] * (2 * self._padding + 1)).long()
        columns = self._places.expand(len(ids), -1)
        if self._flips:
            columns = torch.where((draws[2] < 0.5)[:, None], columns.flip(1), columns)
        rows = (down[:, None] + self._places)[:, :, None]
        return self._images[ids[:, None, None], rows, (right[:, None] + columns)[:, None, :]]
