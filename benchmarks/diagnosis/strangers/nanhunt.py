# Somebody looked for a NaN last month, and left the search on.
import os, torch, torch.nn as nn, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    l = int(os.environ["LOCAL_RANK"])
    dev = torch.device("cuda", l) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(dev)
    torch.manual_seed(0)
    torch.autograd.set_detect_anomaly(True)
    layers = [m for _ in range(12) for m in (nn.Linear(256, 256), nn.LayerNorm(256), nn.ReLU())]
    model = DDP(nn.Sequential(*layers, nn.Linear(256, 10)).to(dev), device_ids=[l] if cuda else None)
    opt = torch.optim.AdamW(model.parameters(), 1e-3)
    ds = TensorDataset(torch.rand(8000, 256), torch.randint(0, 10, (8000,)))
    s = DistributedSampler(ds)
    for ep in range(500):
        s.set_epoch(ep)
        for x, y in DataLoader(ds, 64, sampler=s):
            loss = nn.functional.cross_entropy(model(x.to(dev)), y.to(dev))
            opt.zero_grad()
            loss.backward()
            opt.step()
        if l == 0:
            print(ep, loss.item(), flush=True)


main()
