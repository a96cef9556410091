# One optimizer a parameter, stepped as soon as its gradient is there: no gradient is kept.
import time

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)


def cnn():
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, 1, 1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, 2, 1),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3, 2, 1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * 64, 10),
    )


model = cnn().to(DEVICE)
optimizers = {p: torch.optim.AdamW([p], 1e-3) for p in model.parameters()}


def update(p):
    optimizers[p].step()
    optimizers[p].zero_grad()


for p in model.parameters():
    p.register_post_accumulate_grad_hook(update)


class Decoded(TensorDataset):
    def __getitem__(self, i):
        over = time.perf_counter() + 0.0002
        while time.perf_counter() < over:
            pass
        return super().__getitem__(i)


ds = Decoded(torch.rand(4000, 3, 32, 32), torch.randint(0, 10, (4000,)))
for ep in range(500):
    for x, y in DataLoader(ds, 64, shuffle=True):
        loss = nn.functional.cross_entropy(model(x.to(DEVICE)), y.to(DEVICE))
        loss.backward()
    print(ep, loss.item(), flush=True)
