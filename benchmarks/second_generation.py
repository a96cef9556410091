"""CIFAR-10 with every image through JPEG once more: what a generation costs in accuracy.

    export NFOLD_ACCEPT_SHA256=$(python benchmarks/second_generation.py --quality 75 --to again-75)
    NFOLD_DATA=again-75 NFOLD_CACHE=again-75/cache nfold train cnn10 ...

Images are moved by 4 pixels (edges repeated) before they are encoded and back afterwards, so that
blocks of 8 and colour at half resolution fall on other pixels than in the first generation.
Writes CIFAR-10's own binary files and prints their SHA-256.
"""

from __future__ import annotations

import argparse
import hashlib
import io
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

from nfold import data

SHIFT = 4
SIDE = 32
FILES = (*(f"data_batch_{n}.bin" for n in range(1, 6)), "test_batch.bin")
Images = npt.NDArray[np.uint8]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--quality", type=int, default=75)
    parser.add_argument("--to", type=Path, required=True)
    asked = parser.parse_args()
    arrays = data.load("cifar10")
    labels = np.concatenate([arrays.train_labels, arrays.test_labels])
    batches = np.split(np.concatenate([arrays.train_images, arrays.test_images]), len(FILES))
    folder = asked.to / "cifar10"
    folder.mkdir(parents=True, exist_ok=True)
    digests = []
    with ProcessPoolExecutor() as pool:
        made = pool.map(partial(encoded_again, quality=asked.quality), batches)
        for name, images, own in zip(FILES, made, np.split(labels, len(FILES)), strict=True):
            content = records(images, own)
            (folder / name).write_bytes(content)
            digests.append(hashlib.sha256(content).hexdigest())
    print(",".join(digests))


def encoded_again(images: Images, *, quality: int) -> Images:
    """Images [n, 32, 32, 3] after one more JPEG, colour at half resolution."""
    return np.stack([_encoded_again(image, quality) for image in images])


def _encoded_again(image: Images, quality: int) -> Images:
    moved = np.pad(image, ((SHIFT, 12), (SHIFT, 12), (0, 0)), mode="edge")
    file = io.BytesIO()
    Image.fromarray(moved).save(file, "JPEG", quality=quality, subsampling="4:2:0")
    decoded = np.asarray(Image.open(file))
    return decoded[SHIFT : SHIFT + SIDE, SHIFT : SHIFT + SIDE]


def records(images: Images, labels: npt.NDArray[np.int64]) -> bytes:
    """CIFAR-10's records: a label byte, then the image colour by colour."""
    planes = images.transpose(0, 3, 1, 2).reshape(len(images), -1)
    return np.concatenate([labels[:, None].astype(np.uint8), planes], axis=1).tobytes()


if __name__ == "__main__":
    main()
