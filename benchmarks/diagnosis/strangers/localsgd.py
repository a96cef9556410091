# Local SGD: every rank steps by itself, weights averaged every 8 steps.
import os, torch, torch.nn as nn, torch.distributed as dist
from torch.utils.data import TensorDataset, DataLoader, DistributedSampler


def main():
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    l = int(os.environ["LOCAL_RANK"])
    dev = torch.device("cuda", l) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(dev)
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 32, 3, 1, 1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, 2, 1),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3, 2, 1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * 64, 10),
    ).to(dev)
    ds = TensorDataset(torch.rand(8000, 3, 32, 32), torch.randint(0, 10, (8000,)))
    s = DistributedSampler(ds)
    dl = DataLoader(ds, 32, sampler=s, num_workers=1, persistent_workers=True)
    opt = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)
    step = 0
    for ep in range(500):
        s.set_epoch(ep)
        for x, y in dl:
            loss = nn.functional.cross_entropy(net(x.to(dev)), y.to(dev))
            opt.zero_grad()
            loss.backward()
            opt.step()
            step += 1
            if step % 8 == 0:
                with torch.no_grad():
                    for p in net.parameters():
                        dist.all_reduce(p)
                        p /= dist.get_world_size()
        if l == 0:
            print(ep, loss.item(), flush=True)


main()
