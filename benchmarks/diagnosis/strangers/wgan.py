"""WGAN-GP, two DDP models, several critic steps for one of the generator."""
import argparse, os, time
import torch
import torch.distributed as dist
import torch.nn as nn
from torch import autograd
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

p = argparse.ArgumentParser()
p.add_argument("--batch", type=int, default=64)
p.add_argument("--n-critic", type=int, default=5)
p.add_argument("--z", type=int, default=64)
args = p.parse_args()

cuda = torch.cuda.is_available()
dist.init_process_group("nccl" if cuda else "gloo")
local = int(os.environ.get("LOCAL_RANK", 0))
dev = torch.device(f"cuda:{local}" if cuda else "cpu")
if cuda:
    torch.cuda.set_device(dev)

G = nn.Sequential(nn.Linear(args.z, 256), nn.ReLU(), nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 784), nn.Tanh()).to(dev)
D = nn.Sequential(nn.Linear(784, 512), nn.LeakyReLU(0.2), nn.Linear(512, 256), nn.LeakyReLU(0.2), nn.Linear(256, 1)).to(dev)
G = DDP(G, device_ids=[local] if cuda else None)
D = DDP(D, device_ids=[local] if cuda else None)
og = torch.optim.Adam(G.parameters(), 1e-4, betas=(0.0, 0.9))
od = torch.optim.Adam(D.parameters(), 1e-4, betas=(0.0, 0.9))

data = TensorDataset(torch.rand(12800, 784) * 2 - 1)
sampler = DistributedSampler(data)
loader = DataLoader(data, args.batch, sampler=sampler, num_workers=2, drop_last=True, pin_memory=cuda)


def penalty(real, fake):
    a = torch.rand(real.size(0), 1, device=dev)
    mix = (a * real + (1 - a) * fake).requires_grad_(True)
    out = D(mix)
    (grad,) = autograd.grad(out, mix, torch.ones_like(out), create_graph=True, retain_graph=True)
    return ((grad.norm(2, 1) - 1) ** 2).mean()


it = 0
for epoch in range(10000):
    sampler.set_epoch(epoch)
    t0 = time.time()
    for (real,) in loader:
        real = real.to(dev, non_blocking=True)
        with torch.no_grad():
            fake = G(torch.randn(real.size(0), args.z, device=dev))
        od.zero_grad()
        d_loss = D(fake).mean() - D(real).mean() + 10 * penalty(real, fake)
        d_loss.backward()
        od.step()
        it += 1
        if it % args.n_critic == 0:
            og.zero_grad()
            g_loss = -D(G(torch.randn(real.size(0), args.z, device=dev))).mean()
            g_loss.backward()
            og.step()
    if dist.get_rank() == 0:
        print(f"epoch {epoch} d {d_loss.item():.3f} g {g_loss.item():.3f} {time.time() - t0:.2f}s", flush=True)
