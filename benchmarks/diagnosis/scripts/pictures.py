"""MNIST and CIFAR-10 as arrays of bytes, from the files below NFOLD_DATA."""

from __future__ import annotations

import gzip
import io
import os
import tempfile
from pathlib import Path

import numpy as np
import torch

FOLDER = Path(os.environ.get("NFOLD_DATA", "data"))


def mnist() -> tuple[torch.Tensor, torch.Tensor]:
    """Pictures (n, 1, 28, 28) and labels; the test set where there is no other."""
    part = "train" if (FOLDER / "mnist/train-images-idx3-ubyte.gz").exists() else "t10k"
    with gzip.open(FOLDER / f"mnist/{part}-images-idx3-ubyte.gz") as file:
        pictures = np.frombuffer(file.read(), np.uint8, offset=16).reshape(-1, 1, 28, 28)
    with gzip.open(FOLDER / f"mnist/{part}-labels-idx1-ubyte.gz") as file:
        labels = np.frombuffer(file.read(), np.uint8, offset=8)
    return torch.from_numpy(pictures.copy()), torch.from_numpy(labels.astype(np.int64))


def cifar10(name: str = "train") -> tuple[torch.Tensor, torch.Tensor]:
    """Pictures (n, 3, 32, 32) and labels; decoded once, then read from the temporary folder."""
    kept = Path(tempfile.gettempdir()) / f"cifar10-{name}-{os.getuid()}.npz"
    if not kept.exists():
        pictures, labels = _decoded(FOLDER / f"cifar10/{name}-00000-of-00001.parquet")
        own = kept.with_suffix(f".{os.getpid()}.npz")
        np.savez(own, pictures=pictures, labels=labels)
        own.rename(kept)
    with np.load(kept) as file:
        return torch.from_numpy(file["pictures"]), torch.from_numpy(file["labels"])


def _decoded(file: Path) -> tuple[np.ndarray, np.ndarray]:
    import pyarrow.parquet
    from PIL import Image

    table = pyarrow.parquet.read_table(file).to_pydict()
    files = table.get("img") or table["image"]
    opened = [np.asarray(Image.open(io.BytesIO(one["bytes"])).convert("RGB")) for one in files]
    labels = np.asarray(table.get("label") or table["labels"], np.int64)
    return np.ascontiguousarray(np.stack(opened).transpose(0, 3, 1, 2)), labels
