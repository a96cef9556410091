# Click prediction: large embedding tables with sparse gradients, two optimizers, a dense net.
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset

TABLES = [20000, 5000, 40000, 1000, 300, 8000]


class Clicks(IterableDataset):
    def __init__(self, rank, world, rows=400_000, batch=512):
        self.rank, self.world, self.rows, self.batch = rank, world, rows, batch

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        k = self.rank * (info.num_workers if info else 1) + (info.id if info else 0)
        rng = np.random.default_rng(k)
        n = self.rows // self.batch // self.world // (info.num_workers if info else 1)
        for _ in range(n):
            dense = rng.lognormal(size=(self.batch, 13)).astype(np.float32)
            cat = np.stack([rng.zipf(1.3, self.batch) % t for t in TABLES], 1)
            y = (dense[:, 0] > 1).astype(np.float32)
            yield torch.from_numpy(np.log1p(dense)), torch.from_numpy(cat), torch.from_numpy(y)


class DLRM(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(n, dim, mode="sum", sparse=True) for n in TABLES)
        self.bottom = nn.Sequential(nn.Linear(13, 128), nn.ReLU(), nn.Linear(128, dim), nn.ReLU())
        k = len(TABLES) + 1
        self.top = nn.Sequential(nn.Linear(dim + k * (k - 1) // 2, 256), nn.ReLU(), nn.Linear(256, 64),
                                 nn.ReLU(), nn.Linear(64, 1))

    def forward(self, dense, cat):
        d = self.bottom(dense)
        e = [t(cat[:, i:i + 1]) for i, t in enumerate(self.tables)]
        z = torch.stack([d, *e], 1)
        inter = torch.bmm(z, z.transpose(1, 2))
        i, j = torch.tril_indices(z.shape[1], z.shape[1], -1)
        return self.top(torch.cat([d, inter[:, i, j]], 1)).squeeze(1)


def main():
    cuda = torch.cuda.is_available()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if world > 1:
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    model = DLRM().to(device)
    if world > 1:
        model = DDP(model, device_ids=[local] if cuda else None)
    raw = model.module if world > 1 else model
    sparse = torch.optim.SparseAdam(list(raw.tables.parameters()), lr=1e-3)
    dense = torch.optim.Adam([*raw.bottom.parameters(), *raw.top.parameters()], lr=1e-3)
    loss_fn = nn.BCEWithLogitsLoss()
    for epoch in range(100):
        loader = DataLoader(Clicks(rank, world), batch_size=None, num_workers=1)
        running = 0.0
        for i, (x, c, y) in enumerate(loader):
            x, c, y = x.to(device), c.to(device), y.to(device)
            loss = loss_fn(model(x, c), y)
            sparse.zero_grad()
            dense.zero_grad()
            loss.backward()
            sparse.step()
            dense.step()
            running += loss.item()
            if i % 100 == 99 and rank == 0:
                print(f"[{epoch}, {i + 1}] loss {running / 100:.4f}", flush=True)
                running = 0.0


if __name__ == "__main__":
    main()
