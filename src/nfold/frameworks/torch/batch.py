"""What a rank gets in one step, wherever it comes from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A rank's part of a global batch: uint8 images [n, h, w, c], int64 labels [n].

    ``count`` of them are this rank's samples, of ``global_count`` in the step; a rank without
    a sample gets one that counts 0, because every rank must take part in the exchange.
    ``ids`` int64 [n] and ``epoch`` are what augmentation draws by; ``ids`` is empty where the
    images are augmented already.
    """

    images: Tensor
    labels: Tensor
    ids: Tensor
    epoch: int | Tensor
    count: int
    global_count: int
    sample_hash: int

    def weight(self, world_size: int) -> float:
        """1 where every rank has the same share.

        It makes the mean over ranks of weighted local means the mean over the batch.
        """
        return self.count * world_size / self.global_count

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """What has to be on the device for a step."""
        return self.images, self.labels, self.ids

    def moved(self, move: Callable[[Tensor], Tensor]) -> Batch:
        """The same batch with ``move`` applied to its tensors."""
        images, labels, ids = map(move, self.tensors)
        return dataclasses.replace(self, images=images, labels=labels, ids=ids)

    def pin_memory(self) -> Batch:
        """The same batch in page-locked memory; DataLoader calls this."""
        return self.moved(lambda tensor: tensor.pin_memory())
