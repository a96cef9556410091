# The annotated kind: a Batch class that makes masks, a rate schedule, label smoothing, a loss class that steps.
import os, copy, math, torch, torch.nn as nn, torch.nn.functional as F, torch.distributed as dist
from torch.utils.data import Dataset, DataLoader
from torch.utils.data.distributed import DistributedSampler
from torch.nn.parallel import DistributedDataParallel as DDP


def subsequent(n):
    return torch.triu(torch.ones(1, n, n), 1) == 0


class Batch:
    def __init__(self, src, tgt=None, pad=2):
        self.src = src
        self.src_mask = (src != pad).unsqueeze(-2)
        if tgt is not None:
            self.tgt = tgt[:, :-1]
            self.tgt_y = tgt[:, 1:]
            self.tgt_mask = (self.tgt != pad).unsqueeze(-2) & subsequent(self.tgt.size(-1))
            self.ntokens = (self.tgt_y != pad).sum()

    def pin_memory(self):
        for k in ("src", "src_mask", "tgt", "tgt_y", "tgt_mask"):
            setattr(self, k, getattr(self, k).pin_memory())
        return self

    def cuda(self, d):
        b = copy.copy(self)
        for k in ("src", "src_mask", "tgt", "tgt_y", "tgt_mask", "ntokens"):
            setattr(b, k, getattr(self, k).to(d, non_blocking=True))
        return b


class Pairs(Dataset):
    def __len__(self):
        return 4000

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        n = int(torch.randint(5, 30, (1,), generator=g))
        s = torch.randint(3, 1000, (n,), generator=g)
        return s, s.flip(0)


def collate(items):
    m = 32
    src = torch.full((len(items), m), 2)
    tgt = torch.full((len(items), m), 2)
    for k, (a, b) in enumerate(items):
        src[k, : len(a)] = a
        tgt[k, 0] = 0
        tgt[k, 1 : len(b) + 1] = b
    return Batch(src, tgt)


class Model(nn.Module):
    def __init__(self, v=1000, d=96):
        super().__init__()
        self.e = nn.Embedding(v, d)
        self.d = d
        self.t = nn.Transformer(d, 4, 2, 2, 192, 0.1, batch_first=True)
        self.g = nn.Linear(d, v)

    def forward(self, src, tgt, sm, tm):
        n = tgt.size(1)
        h = self.t(
            self.e(src) * math.sqrt(self.d),
            self.e(tgt) * math.sqrt(self.d),
            tgt_mask=~subsequent(n)[0].to(src.device),
            src_key_padding_mask=~sm[:, 0],
            memory_key_padding_mask=~sm[:, 0],
        )
        return self.g(h)


class Compute:
    def __init__(self, crit):
        self.crit = crit

    def __call__(self, out, y, norm):
        return self.crit(out.reshape(-1, out.size(-1)), y.reshape(-1)) / norm


def epoch(loader, model, comp, opt, sched, dev, rank, accum=2):
    model.train()
    tokens = 0
    total = 0
    for i, b in enumerate(loader):
        b = b.cuda(dev)
        loss = comp(model(b.src, b.tgt, b.src_mask, b.tgt_mask), b.tgt_y, b.ntokens)
        loss.backward()
        if i % accum == 0:
            opt.step()
            opt.zero_grad(set_to_none=True)
        sched.step()
        total += loss.item() * b.ntokens.item()
        tokens += b.ntokens.item()
        if i % 40 == 1 and rank == 0:
            print("step %6d | loss %6.2f | lr %6.1e" % (i, total / tokens, opt.param_groups[0]["lr"]), flush=True)


def main():
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, dev = dist.get_rank(), torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(dev)
    model = DDP(Model().to(dev), device_ids=[dev.index] if cuda else None)
    opt = torch.optim.Adam(model.parameters(), lr=0.5, betas=(0.9, 0.98), eps=1e-9)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: 96**-0.5 * min(max(s, 1) ** -0.5, max(s, 1) * 400**-1.5))
    ds = Pairs()
    samp = DistributedSampler(ds)
    loader = DataLoader(ds, 32, sampler=samp, collate_fn=collate, num_workers=1, pin_memory=cuda)
    for e in range(30):
        samp.set_epoch(e)
        epoch(
            loader,
            model,
            Compute(nn.CrossEntropyLoss(ignore_index=2, label_smoothing=0.1, reduction="sum")),
            opt,
            sched,
            dev,
            rank,
        )


main()
