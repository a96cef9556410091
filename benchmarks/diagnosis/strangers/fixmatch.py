# Semi-supervised: labelled and unlabelled loaders side by side, each begun again when it ends; EMA teacher.
import copy, time, torch, torch.nn as nn, torch.nn.functional as F
from torch.utils.data import Dataset, DataLoader, RandomSampler


class Views(Dataset):
    def __init__(self, n, labelled):
        self.x = torch.rand(n, 3, 32, 32)
        self.y = torch.randint(0, 10, (n,))
        self.labelled = labelled

    def __len__(self):
        return len(self.x)

    def aug(self, x, strong):
        for _ in range(6 if strong else 2):
            x = x.roll(int(torch.randint(-4, 5, ())), -1)
            x = x * (0.9 + 0.2 * torch.rand(()))
        return x

    def __getitem__(self, i):
        if self.labelled:
            return self.aug(self.x[i], False), self.y[i]
        return (self.aug(self.x[i], False), self.aug(self.x[i], True)), self.y[i]


dev = torch.device("cuda" if torch.cuda.is_available() else "cpu")
lab, unl = Views(400, True), Views(4000, False)
ll = DataLoader(lab, 32, sampler=RandomSampler(lab), drop_last=True)
lu = DataLoader(unl, 32, sampler=RandomSampler(unl), drop_last=True)
net = nn.Sequential(
    nn.Conv2d(3, 16, 3, 2, 1),
    nn.BatchNorm2d(16),
    nn.ReLU(),
    nn.Conv2d(16, 32, 3, 2, 1),
    nn.BatchNorm2d(32),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(32, 10),
).to(dev)
ema = copy.deepcopy(net)
opt = torch.optim.SGD(net.parameters(), 0.03, momentum=0.9, nesterov=True)
il, iu = iter(ll), iter(lu)
for epoch in range(200):
    tl = tu = tc = 0.0
    for step in range(100):
        t0 = time.perf_counter()
        try:
            x, y = next(il)
        except StopIteration:
            il = iter(ll)
            x, y = next(il)
        t1 = time.perf_counter()
        try:
            (w, s), _ = next(iu)
        except StopIteration:
            iu = iter(lu)
            (w, s), _ = next(iu)
        t2 = time.perf_counter()
        out = net(torch.cat([x, w, s]).to(dev))
        lx, lw, ls = out.split(32)
        p = lw.detach().softmax(-1)
        m, t = p.max(-1)
        loss = F.cross_entropy(lx, y.to(dev)) + (F.cross_entropy(ls, t, reduction="none") * (m > 0.95)).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        with torch.no_grad():
            for a, b in zip(ema.parameters(), net.parameters()):
                a.mul_(0.999).add_(b, alpha=0.001)
        tl += t1 - t0
        tu += t2 - t1
        tc += time.perf_counter() - t2
    print(f"{epoch} labelled {10 * tl:.2f} unlabelled {10 * tu:.2f} compute {10 * tc:.2f} ms", flush=True)
