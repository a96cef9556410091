"""CIFAR-10 from its Parquet files in $NFOLD_DATA/cifar10, decoded into memory."""

from __future__ import annotations

import io
import os
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from pyarrow import parquet
from torch import Tensor
from torch.utils.data import Dataset

FOLDER = Path(os.environ.get("NFOLD_DATA", "data")) / "cifar10"
MEAN, STD = torch.tensor([0.491, 0.482, 0.447]), torch.tensor([0.247, 0.243, 0.262])


class Cifar10(Dataset[tuple[Tensor, int]]):
    """Images [3, 32, 32]; while training, each padded by 4, cropped at random and flipped."""

    def __init__(self, split: str, samples: int) -> None:
        table = parquet.read_table(next(FOLDER.glob(f"{split}-*.parquet"))).slice(0, samples)
        pictures = (Image.open(io.BytesIO(entry["bytes"])) for entry in table["img"].to_pylist())
        stacked = np.stack([np.asarray(picture) for picture in pictures])
        scaled = (torch.from_numpy(stacked) / 255 - MEAN) / STD
        self.images = scaled.permute(0, 3, 1, 2).contiguous()
        self.labels = table["label"].to_pylist()
        self.training = split == "train"

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = self.images[index]
        if self.training:
            down, right, flipped = torch.randint(9, (3,)).tolist()
            image = torch.nn.functional.pad(image, (4, 4, 4, 4))
            image = image[:, down : down + 32, right : right + 32]
            image = image.flip(2) if flipped % 2 else image
        return image, self.labels[index]
