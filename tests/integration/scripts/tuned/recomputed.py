"""Trains with a small batch, and computes a slow forward again in the backward."""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class SlowClassifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))

    def scores(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)  # as long on any processor, and for any batch
        scores: torch.Tensor = self.layers(x)
        return scores

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = checkpoint(self.scores, x, use_reentrant=False)
        return scores


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(4096, 16), torch.randint(0, 4, (4096,)))
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    model = DistributedDataParallel(SlowClassifier())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(100):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()


if __name__ == "__main__":
    main()
