"""Has a table in a buffer, which DistributedDataParallel sends before every forward."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class WithTable(nn.Module):
    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 4)
        self.register_buffer("table", torch.linspace(0, 1, 1 << 23))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x + self.table[:16])
        return result


def main() -> None:
    dist.init_process_group("gloo")
    data = TensorDataset(torch.randn(2048, 16), torch.randint(0, 4, (2048,)))
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    model = DistributedDataParallel(WithTable())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(1000):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()


if __name__ == "__main__":
    main()
