"""How a device's images are cut, so that copies and kernels of different pieces overlap."""

from __future__ import annotations

from itertools import pairwise

MAX_CHUNKS = 8
"""More chunks gain little: the first upload and the last download, which nothing hides, are
already an eighth each."""
MIN_CHUNK_BYTES = 2**20
"""Of a chunk one way: the copy engine pays some microseconds for each."""


def split_chunks(images: int, image_bytes: int) -> list[slice]:
    """Consecutive pieces of so many images, one at least; sizes differ by one image at most."""
    count = max(1, min(MAX_CHUNKS, images, images * image_bytes // MIN_CHUNK_BYTES))
    edges = [place * images // count for place in range(count + 1)]
    return [slice(start, stop) for start, stop in pairwise(edges)]
