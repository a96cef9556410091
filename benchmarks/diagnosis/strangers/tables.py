# DLRM's way: tables divided over ranks, exchanged by all-to-all; the dense part under DDP.
import os, torch, torch.nn as nn, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import Dataset, DataLoader, DistributedSampler


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x.contiguous())
        return out

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous()  # NCCL takes no other order
        out = torch.empty_like(g)
        dist.all_to_all_single(out, g)
        return out


class Clicks(Dataset):
    def __len__(self):
        return 20000

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        return torch.rand(13, generator=g), torch.randint(0, 5000, (8,), generator=g), float(i % 2)


def main():
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    r, w = dist.get_rank(), dist.get_world_size()
    dev = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(dev)
    torch.manual_seed(r)
    T = 8 // w
    tables = nn.ModuleList(nn.EmbeddingBag(5000, 32, mode="sum") for _ in range(T)).to(dev)
    dense = DDP(
        nn.Sequential(nn.Linear(13 + 8 * 32, 256), nn.ReLU(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 1)).to(dev),
        device_ids=[dev.index] if cuda else None,
    )
    opt = torch.optim.Adagrad([*tables.parameters(), *dense.parameters()], 0.01)
    ds = Clicks()
    s = DistributedSampler(ds)
    dl = DataLoader(ds, 128, sampler=s, num_workers=1, drop_last=True)
    for ep in range(100):
        s.set_epoch(ep)
        for k, (x, c, y) in enumerate(dl):
            x, c, y = x.to(dev), c.to(dev), y.float().to(dev)
            b = len(x)
            # every rank looks up its tables for everybody's samples
            send = c.view(b, w, T).permute(1, 0, 2).contiguous()
            got = torch.empty_like(send)
            dist.all_to_all_single(got, send)
            e = torch.stack([t(got[..., n].reshape(-1, 1)) for n, t in enumerate(tables)], 1).view(w, b, T * 32)
            e = Exchange.apply(e).permute(1, 0, 2).reshape(b, -1)
            loss = nn.functional.binary_cross_entropy_with_logits(dense(torch.cat([x, e], 1)).squeeze(1), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            if k % 50 == 0 and r == 0:
                print(ep, k, loss.item(), flush=True)


main()
