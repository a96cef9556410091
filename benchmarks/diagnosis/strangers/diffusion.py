# Diffusion in the usual shape: an endless loader, mixed precision, accumulation, a moving average.
import argparse
import copy
import math
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset


def cycle(dl):
    while True:
        for data in dl:
            yield data


class Images(Dataset):
    def __init__(self, n=3000, size=32):
        self.x = torch.randint(0, 255, (n, 3, size, size), dtype=torch.uint8)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        x = self.x[i].float() / 255
        return x.flip(-1) if torch.rand(()) < 0.5 else x


class Res(nn.Module):
    def __init__(self, c, o, t):
        super().__init__()
        self.a, self.b = nn.Conv2d(c, o, 3, padding=1), nn.Conv2d(o, o, 3, padding=1)
        self.n1, self.n2 = nn.GroupNorm(8, c), nn.GroupNorm(8, o)
        self.t = nn.Linear(t, o)
        self.s = nn.Conv2d(c, o, 1) if c != o else nn.Identity()

    def forward(self, x, t):
        h = self.a(F.silu(self.n1(x))) + self.t(F.silu(t))[:, :, None, None]
        return self.b(F.silu(self.n2(h))) + self.s(x)


class Unet(nn.Module):
    def __init__(self, c=32, t=64):
        super().__init__()
        self.inp = nn.Conv2d(3, c, 3, padding=1)
        self.temb = nn.Sequential(nn.Linear(t, t), nn.SiLU(), nn.Linear(t, t))
        self.d1, self.d2 = Res(c, c, t), Res(c, 2 * c, t)
        self.attn = nn.MultiheadAttention(2 * c, 4, batch_first=True)
        self.u1 = Res(3 * c, c, t)
        self.out = nn.Conv2d(c, 3, 1)
        self.t = t

    def embed(self, t):
        f = torch.exp(-math.log(10000) * torch.arange(self.t // 2, device=t.device) / (self.t // 2))
        e = t[:, None].float() * f[None]
        return self.temb(torch.cat([e.sin(), e.cos()], 1))

    def forward(self, x, t):
        t = self.embed(t)
        a = self.d1(self.inp(x), t)
        b = self.d2(F.avg_pool2d(a, 2), t)
        q = b.flatten(2).transpose(1, 2)
        b = b + self.attn(q, q, q, need_weights=False)[0].transpose(1, 2).view_as(b)
        u = F.interpolate(b, scale_factor=2, mode="nearest")
        return self.out(self.u1(torch.cat([u, a], 1), t))


class Diffusion(nn.Module):
    def __init__(self, model, steps=1000):
        super().__init__()
        self.model, self.steps = model, steps
        ac = torch.cumprod(1 - torch.linspace(1e-4, 0.02, steps), 0)
        self.register_buffer("sa", ac.sqrt())
        self.register_buffer("sb", (1 - ac).sqrt())

    def forward(self, img):
        t = torch.randint(0, self.steps, (img.shape[0],), device=img.device).long()
        img = img * 2 - 1
        noise = torch.randn_like(img)
        x = self.sa[t][:, None, None, None] * img + self.sb[t][:, None, None, None] * noise
        return F.mse_loss(self.model(x, t), noise)

    @torch.no_grad()
    def sample(self, n, device):
        x = torch.randn(n, 3, 32, 32, device=device)
        for i in reversed(range(0, self.steps, 100)):
            x = x - 0.1 * self.model(x, torch.full((n,), i, device=device))
        return x


class Trainer:
    def __init__(self, model, args):
        cuda = torch.cuda.is_available()
        self.ddp = "RANK" in os.environ
        self.rank = int(os.environ.get("RANK", 0))
        self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
        if self.ddp:
            dist.init_process_group("nccl" if cuda else "gloo")
        self.raw = model.to(self.device)
        self.model = DDP(self.raw, device_ids=[self.device.index] if cuda else None) if self.ddp else self.raw
        self.ema = copy.deepcopy(self.raw).requires_grad_(False) if self.rank == 0 else None
        self.accumulate = args.gradient_accumulate_every
        data = Images()
        self.dl = cycle(DataLoader(data, args.batch, shuffle=True, num_workers=args.workers, pin_memory=True))
        self.opt = torch.optim.Adam(self.raw.parameters(), lr=8e-5, betas=(0.9, 0.99))
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=cuda)
        self.step, self.num_steps = 0, args.train_num_steps
        self.save_every = args.save_every
        self.results = Path("./results")
        self.results.mkdir(exist_ok=True)

    def train(self):
        while self.step < self.num_steps:
            total = 0.0
            for _ in range(self.accumulate):
                data = next(self.dl).to(self.device)
                with torch.autocast(self.device.type, dtype=torch.float16, enabled=self.device.type == "cuda"):
                    loss = self.model(data) / self.accumulate
                    total += loss.item()
                self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.opt)
            torch.nn.utils.clip_grad_norm_(self.raw.parameters(), 1.0)
            self.scaler.step(self.opt)
            self.scaler.update()
            self.opt.zero_grad()
            self.step += 1
            if self.rank == 0:
                with torch.no_grad():
                    for e, p in zip(self.ema.parameters(), self.raw.parameters()):
                        e.lerp_(p, 0.005)
                if self.step % self.save_every == 0:
                    self.ema.eval()
                    self.ema.sample(8, self.device)
                    torch.save({"step": self.step, "ema": self.ema.state_dict(), "opt": self.opt.state_dict()},
                               self.results / f"model-{self.step // self.save_every}.pt")
                if self.step % 20 == 0:
                    print(f"{self.step}/{self.num_steps} loss: {total:.4f}", flush=True)


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--batch", type=int, default=16)
    p.add_argument("--gradient_accumulate_every", type=int, default=2)
    p.add_argument("--train_num_steps", type=int, default=20000)
    p.add_argument("--save_every", type=int, default=100)
    p.add_argument("--workers", type=int, default=1)
    Trainer(Diffusion(Unet()), p.parse_args()).train()
