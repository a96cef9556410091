"""A file of tokens; ``python data.py tokens.bin TEXT...`` writes the bytes of text files as one."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset


class TokenFile(Dataset[dict[str, Tensor]]):
    """Consecutive windows of a file of uint16 tokens, which is not read into memory at once."""

    def __init__(self, file: str, length: int) -> None:
        self.tokens = np.memmap(file, np.uint16, mode="r")
        self.length = length

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        start = index * self.length
        window = self.tokens[start : start + self.length + 1].astype(np.int64)
        tokens = torch.from_numpy(window)
        return {"input_ids": tokens[:-1], "labels": tokens[1:]}


if __name__ == "__main__":
    text = b"".join(Path(file).read_bytes() for file in sys.argv[2:])
    np.frombuffer(text, np.uint8).astype(np.uint16).tofile(sys.argv[1])
