"""A part of a data set of photographs: JPEGs after one another, and what is known of them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from nfold.data.arrays import Images, Labels
from nfold.data.decode import decode_jpeg
from nfold.errors import DataCorrupt


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedJpegs:
    """JPEGs [n], their sizes as (height, width) int64 [n, 2] and labels int64 [n].

    ``whole`` are all of them decoded, [h, w, 3] after [h, w, 3], where they are kept so.
    """

    encoded: Images
    starts: Labels
    sizes: Labels
    labels: Labels
    names: Path
    decoded_pixels: Images | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def jpeg(self, index: int) -> Images:
        """The bytes of one file."""
        return self.encoded[self.starts[index] : self.starts[index + 1]]

    def name(self, index: int) -> str:
        """The file, or the shard, row and path in it."""
        return self.names.read_text().split("\n")[index]

    def first(self, samples: int) -> PackedJpegs:
        """The first so many; 0: all."""
        if not samples:
            return self
        kept = {name: getattr(self, name)[:samples] for name in ("sizes", "labels")}
        return dataclasses.replace(self, **kept)

    @cached_property
    def pixel_offsets(self) -> Labels:
        """Where each image begins in ``whole``, and the last one ends: int64 [n + 1]."""
        return np.cumsum([0, *(3 * self.sizes.prod(axis=1))])

    def decode(self, index: int, reduction: int = 1) -> Images:
        """An image, reduced; from ``whole`` where it is there and nothing is to be left out.

        Raises DataCorrupt with the name of a file that is no longer what it was.
        """
        height, width = self.sizes[index].tolist()
        if self.decoded_pixels is not None and reduction == 1:
            kept = self.decoded_pixels[self.pixel_offsets[index] : self.pixel_offsets[index + 1]]
            return kept.reshape(height, width, 3)
        try:
            image = decode_jpeg(self.jpeg(index), height, width, reduction)
        except (OSError, ValueError) as error:
            raise DataCorrupt(f"{self.name(index)} cannot be decoded: {error}") from error
        if image.shape[:2] != (-(-height // reduction), -(-width // reduction)):
            raise DataCorrupt(
                f"{self.name(index)}: decodes to {image.shape}, not {height} × {width}"
            )
        return image
