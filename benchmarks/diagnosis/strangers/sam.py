# Sharpness-aware minimisation under DDP by mp.spawn: two forward/backward passes per update, the first not synchronised.
import os, torch, torch.nn as nn, torch.nn.functional as F, torch.distributed as dist, torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import TensorDataset, DataLoader, DistributedSampler


class SAM(torch.optim.Optimizer):
    def __init__(self, params, base, rho=0.05, **kw):
        super().__init__(params, dict(rho=rho, **kw))
        self.base = base(self.param_groups, **kw)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self):
        norm = torch.norm(torch.stack([p.grad.norm() for g in self.param_groups for p in g["params"]]))
        for g in self.param_groups:
            for p in g["params"]:
                e = p.grad * (g["rho"] / (norm + 1e-12))
                p.add_(e)
                self.state[p]["e"] = e
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for g in self.param_groups:
            for p in g["params"]:
                p.sub_(self.state[p]["e"])
        self.base.step()
        self.zero_grad()

    def step(self, closure=None):
        raise NotImplementedError


def worker(rank, world):
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29777")
    dist.init_process_group("gloo", rank=rank, world_size=world)
    torch.manual_seed(0)
    x, y = torch.rand(4000, 3, 32, 32), torch.randint(0, 10, (4000,))
    ds = TensorDataset(x, y)
    s = DistributedSampler(ds)
    dl = DataLoader(ds, 32, sampler=s, drop_last=True)
    net = DDP(nn.Sequential(nn.Conv2d(3, 16, 3, 2), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, 2), nn.ReLU(),
                            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)))
    opt = SAM(net.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    for ep in range(200):
        s.set_epoch(ep)
        for a, b in dl:
            with net.no_sync():
                F.cross_entropy(net(a), b).backward()
            opt.first_step()
            F.cross_entropy(net(a), b).backward()
            opt.second_step()
    dist.destroy_process_group()


if __name__ == "__main__":
    world = max(2, torch.cuda.device_count())
    mp.spawn(worker, args=(world,), nprocs=world)
