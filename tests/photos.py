"""Small photographs for tests: JPEGs made on the spot, in folders or in memory."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

SIZES = ((60, 90), (110, 40), (75, 75), (33, 200), (220, 300), (20, 24), (640, 480), (90, 61))
"""Heights and widths: wide, high, smaller and much larger than the size that tests train at."""


def picture(height: int, width: int, seed: int = 0) -> npt.NDArray[np.uint8]:
    """A smooth, colourful image [height, width, 3]."""
    random = np.random.default_rng(seed)
    down, right = np.mgrid[0:height, 0:width]
    waves = [np.sin(down / random.uniform(5, 30) + right / random.uniform(5, 30)) for _ in range(3)]
    return (127.5 + 127.5 * np.stack(waves, axis=-1)).astype(np.uint8)


def jpeg(height: int, width: int, seed: int = 0, *, mode: str = "RGB") -> bytes:
    """A JPEG of such an image."""
    buffer = io.BytesIO()
    Image.fromarray(picture(height, width, seed)).convert(mode).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def folders(place: Path, classes: int = 2, sizes: tuple[tuple[int, int], ...] = SIZES) -> Path:
    """A folder per class in ``place/train``, the images dealt out to them in turn."""
    for number, (height, width) in enumerate(sizes):
        folder = place / "train" / f"class{number % classes}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number}.jpg").write_bytes(jpeg(height, width, number))
    return place
