# Knowledge distillation with an EMA of the student, mixup, validation and checkpoints.
import argparse
import copy
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as NativeDDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Synthetic(Dataset):
    def __init__(self, n, train):
        g = torch.Generator().manual_seed(int(train))
        self.x = torch.randint(0, 256, (n, 3, 32, 32), generator=g, dtype=torch.uint8)
        self.y = torch.randint(0, 10, (n,), generator=g)
        self.train = train

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        x = self.x[i].float().div(255).sub(0.5)
        if self.train and torch.rand(()) < 0.5:
            x = x.flip(-1)
        return x, self.y[i]


class Mixup:
    def __init__(self, alpha, classes):
        self.alpha, self.classes = alpha, classes

    def __call__(self, x, y):
        lam = torch.distributions.Beta(self.alpha, self.alpha).sample().item()
        hot = F.one_hot(y, self.classes).float()
        return x * lam + x.flip(0) * (1 - lam), hot * lam + hot.flip(0) * (1 - lam)


def conv(width):
    layers, c = [], 3
    for w in (width, 2 * width, 4 * width):
        layers += [nn.Conv2d(c, w, 3, 2, 1, bias=False), nn.BatchNorm2d(w), nn.ReLU()]
        c = w
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(c, 10))


class ModelEma(nn.Module):
    def __init__(self, model, decay):
        super().__init__()
        self.module = copy.deepcopy(model).eval()
        self.decay = decay

    @torch.no_grad()
    def update(self, model):
        for e, m in zip(self.module.state_dict().values(), model.state_dict().values()):
            e.copy_(self.decay * e + (1.0 - self.decay) * m)


class AverageMeter:
    def __init__(self):
        self.sum = self.count = 0.0

    def update(self, v, n=1):
        self.sum, self.count = self.sum + v * n, self.count + n

    @property
    def avg(self):
        return self.sum / max(1, self.count)


def reduce_tensor(t, n):
    t = t.clone()
    dist.all_reduce(t, op=dist.ReduceOp.SUM)
    return t / n


def validate(model, loader, device, distributed, world):
    meter = AverageMeter()
    model.eval()
    with torch.no_grad():
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            acc = (model(x).argmax(1) == y).float().mean()
            if distributed:
                acc = reduce_tensor(acc, world)
            meter.update(acc.item(), len(y))
    return meter.avg


def main():
    p = argparse.ArgumentParser()
    p.add_argument("-b", "--batch-size", type=int, default=64)
    p.add_argument("-j", "--workers", type=int, default=1)
    p.add_argument("--epochs", type=int, default=100)
    p.add_argument("--log-interval", type=int, default=10)
    args = p.parse_args()
    args.world_size = int(os.environ.get("WORLD_SIZE", 1))
    args.distributed = args.world_size > 1
    args.local_rank = int(os.environ.get("LOCAL_RANK", 0))
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", args.local_rank) if cuda else torch.device("cpu")
    if args.distributed:
        dist.init_process_group("nccl" if cuda else "gloo", init_method="env://")
    rank = dist.get_rank() if args.distributed else 0
    torch.manual_seed(42 + rank)
    teacher, student = conv(48).to(device).eval(), conv(16).to(device)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3, weight_decay=0.05)
    ema = ModelEma(student, 0.999)
    if args.distributed:
        student = NativeDDP(student, device_ids=[args.local_rank] if cuda else None)
    raw = student.module if args.distributed else student
    train, val = Synthetic(6400, True), Synthetic(1280, False)
    ts = DistributedSampler(train) if args.distributed else None
    vs = DistributedSampler(val, shuffle=False) if args.distributed else None
    lt = DataLoader(train, args.batch_size, sampler=ts, shuffle=ts is None, num_workers=args.workers,
                    pin_memory=cuda, drop_last=True, persistent_workers=args.workers > 0)
    lv = DataLoader(val, args.batch_size, sampler=vs, num_workers=args.workers, pin_memory=cuda)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    mix = Mixup(0.2, 10)
    best = 0.0
    for epoch in range(args.epochs):
        if ts is not None:
            ts.set_epoch(epoch)
        student.train()
        losses, batch_time = AverageMeter(), AverageMeter()
        end = time.time()
        for i, (x, y) in enumerate(lt):
            x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
            x, y = mix(x, y)
            with torch.no_grad():
                t = teacher(x)
            out = student(x)
            loss = F.cross_entropy(out, y) + F.kl_div(F.log_softmax(out, 1), F.softmax(t, 1), reduction="batchmean")
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
            optimizer.step()
            ema.update(raw)
            if cuda:
                torch.cuda.synchronize()
            batch_time.update(time.time() - end)
            if i % args.log_interval == 0:
                shown = reduce_tensor(loss.detach(), args.world_size) if args.distributed else loss.detach()
                losses.update(shown.item(), len(x))
                if rank == 0:
                    print(f"Train: {epoch} [{i}/{len(lt)}] Loss: {losses.avg:.4f} Time: {batch_time.avg:.4f}s", flush=True)
            end = time.time()
        acc = validate(student, lv, device, args.distributed, args.world_size)
        acc_ema = validate(ema.module, lv, device, args.distributed, args.world_size)
        sched.step()
        if rank == 0 and acc_ema >= best:
            best = acc_ema
            torch.save({"epoch": epoch, "state_dict": raw.state_dict(), "ema": ema.module.state_dict(),
                        "optimizer": optimizer.state_dict()}, "checkpoint-best.pth.tar")


if __name__ == "__main__":
    main()
