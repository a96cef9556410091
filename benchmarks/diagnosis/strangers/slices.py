# A global batch on every rank, of which each takes its slice; gradients averaged by hand.
import os, torch, torch.nn as nn, torch.distributed as dist
from torch.utils.data import Dataset, DataLoader


class Pics(Dataset):
    def __len__(self):
        return 6000

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        x = torch.rand(3, 32, 32, generator=g)
        return (x - x.mean()) / x.std(), i % 10


def main():
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    r, w = dist.get_rank(), dist.get_world_size()
    dev = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
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
    opt = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)
    loader = DataLoader(Pics(), 64, shuffle=True, generator=torch.Generator().manual_seed(7), drop_last=True)
    for ep in range(100):
        for x, y in loader:
            n = len(x) // w
            x, y = x[r * n : (r + 1) * n].to(dev), y[r * n : (r + 1) * n].to(dev)
            loss = nn.functional.cross_entropy(net(x), y)
            opt.zero_grad()
            loss.backward()
            for p in net.parameters():
                dist.all_reduce(p.grad)
                p.grad /= w
            opt.step()
        if r == 0:
            print(ep, loss.item(), flush=True)


main()
