# Contrastive pre-training with a momentum encoder and a queue, in the usual shape.
import argparse
import builtins
import math
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Pictures(Dataset):
    def __init__(self, n=4096):
        g = torch.Generator().manual_seed(0)
        self.x = torch.randint(0, 255, (n, 3, 40, 40), generator=g, dtype=torch.uint8)

    def __len__(self):
        return len(self.x)

    def _aug(self, x):
        i, j = torch.randint(0, 8, (2,)).tolist()
        x = x[:, i:i + 32, j:j + 32].float() / 255
        if torch.rand(()) < 0.5:
            x = x.flip(2)
        return (x * (0.6 + 0.8 * torch.rand(3, 1, 1)) - 0.5) / 0.25

    def __getitem__(self, i):
        return [self._aug(self.x[i]), self._aug(self.x[i])], 0


def encoder(dim=64):
    def block(i, o, s):
        return nn.Sequential(nn.Conv2d(i, o, 3, s, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU(inplace=True))
    return nn.Sequential(block(3, 24, 1), block(24, 48, 2), block(48, 96, 2), nn.AdaptiveAvgPool2d(1),
                         nn.Flatten(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, dim))


@torch.no_grad()
def concat_all_gather(tensor):
    gathered = [torch.ones_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, tensor, async_op=False)
    return torch.cat(gathered, dim=0)


class MoCo(nn.Module):
    def __init__(self, dim=64, K=2048, m=0.999, T=0.07):
        super().__init__()
        self.K, self.m, self.T = K, m, T
        self.encoder_q, self.encoder_k = encoder(dim), encoder(dim)
        for q, k in zip(self.encoder_q.parameters(), self.encoder_k.parameters()):
            k.data.copy_(q.data)
            k.requires_grad = False
        self.register_buffer("queue", nn.functional.normalize(torch.randn(dim, K), dim=0))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def _momentum_update(self):
        for q, k in zip(self.encoder_q.parameters(), self.encoder_k.parameters()):
            k.data = k.data * self.m + q.data * (1.0 - self.m)

    @torch.no_grad()
    def _enqueue(self, keys):
        keys = concat_all_gather(keys)
        n, ptr = keys.shape[0], int(self.queue_ptr)
        self.queue[:, ptr:ptr + n] = keys.T
        self.queue_ptr[0] = (ptr + n) % self.K

    @torch.no_grad()
    def _shuffle(self, x):
        this = x.shape[0]
        x_gather = concat_all_gather(x)
        idx = torch.randperm(x_gather.shape[0]).to(x.device)
        dist.broadcast(idx, src=0)
        unshuffle = torch.argsort(idx)
        mine = idx.view(x_gather.shape[0] // this, -1)[dist.get_rank()]
        return x_gather[mine], unshuffle

    @torch.no_grad()
    def _unshuffle(self, x, unshuffle):
        this = x.shape[0]
        x_gather = concat_all_gather(x)
        mine = unshuffle.view(x_gather.shape[0] // this, -1)[dist.get_rank()]
        return x_gather[mine]

    def forward(self, im_q, im_k):
        q = nn.functional.normalize(self.encoder_q(im_q), dim=1)
        with torch.no_grad():
            self._momentum_update()
            im_k, un = self._shuffle(im_k)
            k = nn.functional.normalize(self.encoder_k(im_k), dim=1)
            k = self._unshuffle(k, un)
        pos = torch.einsum("nc,nc->n", [q, k]).unsqueeze(-1)
        neg = torch.einsum("nc,ck->nk", [q, self.queue.clone().detach()])
        logits = torch.cat([pos, neg], dim=1) / self.T
        labels = torch.zeros(logits.shape[0], dtype=torch.long, device=logits.device)
        self._enqueue(k)
        return logits, labels


class AverageMeter:
    def __init__(self, name):
        self.name, self.sum, self.count = name, 0.0, 0

    def update(self, v, n=1):
        self.sum += v * n
        self.count += n


def accuracy(output, target, topk=(1,)):
    with torch.no_grad():
        _, pred = output.topk(max(topk), 1, True, True)
        correct = pred.t().eq(target.view(1, -1).expand_as(pred.t()))
        return [correct[:k].reshape(-1).float().sum(0, keepdim=True).mul_(100.0 / target.size(0)) for k in topk]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("-b", "--batch-size", type=int, default=64)
    parser.add_argument("-j", "--workers", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=200)
    args = parser.parse_args()
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    local = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if local:
        builtins.print = lambda *a, **k: None
    model = MoCo().to(device)
    model = DistributedDataParallel(model, device_ids=[local] if cuda else None)
    criterion = nn.CrossEntropyLoss().to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.03, momentum=0.9, weight_decay=1e-4)
    data = Pictures()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=args.batch_size, shuffle=False, num_workers=args.workers,
                        pin_memory=True, sampler=sampler, drop_last=True)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for g in optimizer.param_groups:
            g["lr"] = 0.03 * 0.5 * (1.0 + math.cos(math.pi * epoch / args.epochs))
        losses, top1, batch_time, data_time = (AverageMeter(n) for n in ("Loss", "Acc@1", "Time", "Data"))
        model.train()
        end = time.time()
        for i, (images, _) in enumerate(loader):
            data_time.update(time.time() - end)
            if cuda:
                images[0] = images[0].cuda(local, non_blocking=True)
                images[1] = images[1].cuda(local, non_blocking=True)
            output, target = model(im_q=images[0], im_k=images[1])
            loss = criterion(output, target)
            acc1, _ = accuracy(output, target, topk=(1, 5))
            losses.update(loss.item(), images[0].size(0))
            top1.update(acc1[0].item(), images[0].size(0))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            batch_time.update(time.time() - end)
            end = time.time()
            if i % 10 == 0:
                print(f"Epoch [{epoch}][{i}/{len(loader)}] Loss {losses.sum / losses.count:.3f}", flush=True)


if __name__ == "__main__":
    main()
