# Progressive resizing: images grow after some epochs; DDP with EMA by swa_utils, evaluation by rank 0 only.
import os, torch, torch.nn as nn, torch.nn.functional as F, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import Dataset, DataLoader, DistributedSampler


class Images(Dataset):
    def __init__(self, n):
        self.x = torch.randint(0, 255, (n, 3, 64, 64), dtype=torch.uint8)
        self.y = torch.randint(0, 10, (n,))
        self.size = 24

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        x = self.x[i].float().div(255)[None]
        return F.interpolate(x, size=self.size, mode="bilinear", antialias=True)[0], self.y[i]


dist.init_process_group("gloo")
r = dist.get_rank()
torch.manual_seed(0)
tr, va = Images(1600), Images(200)
s = DistributedSampler(tr)
dl = DataLoader(tr, 32, sampler=s, num_workers=1, persistent_workers=False)
vl = DataLoader(va, 50)
net = nn.Sequential(nn.Conv2d(3, 24, 3, 2, 1), nn.BatchNorm2d(24), nn.ReLU(), nn.Conv2d(24, 48, 3, 2, 1), nn.BatchNorm2d(48), nn.ReLU(),
                    nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, 10))
model = DDP(net)
ema = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.99))
opt = torch.optim.SGD(model.parameters(), 0.1, 0.9)
for ep in range(300):
    tr.size = va.size = min(64, 24 + 8 * ep)
    s.set_epoch(ep)
    model.train()
    for x, y in dl:
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad(); loss.backward(); opt.step()
        ema.update_parameters(net)
    if r == 0:
        ema.eval()
        with torch.no_grad():
            acc = sum(int((ema(x).argmax(1) == y).sum()) for x, y in vl) / len(va)
        print(ep, tr.size, acc, flush=True)
    dist.barrier()
