"""A folder of images, one subfolder per class; ``python data.py FOLDER`` writes one of digits."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset


class ImageFolder(Dataset[tuple[Tensor, int]]):
    """Images [3, h, w] and the numbers of their classes, in the order of their names."""

    def __init__(self, folder: str) -> None:
        self.files = sorted(Path(folder).glob("*/*.png"), key=lambda file: file.name)
        self.classes = sorted({file.parent.name for file in self.files})

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        file = self.files[index]
        pixels = torch.from_numpy(np.array(Image.open(file).convert("RGB")))
        return pixels.permute(2, 0, 1) / 127.5 - 1, self.classes.index(file.parent.name)


def write_digits(folder: Path) -> None:
    """Write the digits that nfold ships as PNG of 32 × 32 pixels: train/CLASS/, test/CLASS/."""
    from nfold.data.digits import decode

    digits = decode({})
    for split in ("train", "test"):
        images, labels = getattr(digits, f"{split}_images"), getattr(digits, f"{split}_labels")
        for number, (image, label) in enumerate(zip(images, labels, strict=True)):
            file = folder / split / str(label) / f"{number:04}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image[..., 0].repeat(4, axis=0).repeat(4, axis=1)).save(file)


if __name__ == "__main__":
    write_digits(Path(sys.argv[1]))
