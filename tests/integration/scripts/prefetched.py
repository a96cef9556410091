"""A loop on one device that waits for its loader: ``prefetched.py PREFETCH_FACTOR``."""

import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class SlowRows(Dataset[tuple[torch.Tensor, int]]):
    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(0.02)
        return torch.ones(16), index % 4


def main() -> None:
    loader = DataLoader(SlowRows(), batch_size=1, num_workers=1, prefetch_factor=int(sys.argv[1]))
    model = nn.Linear(16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


if __name__ == "__main__":
    main()
