# MAML: an outer Adam, inner updates by torch.func; episodes sampled from an in-memory set by a generator function.
import random, torch, torch.nn as nn, torch.nn.functional as F
from torch.func import functional_call
torch.manual_seed(0)
data = torch.rand(100, 20, 1, 28, 28)
net = nn.Sequential(nn.Conv2d(1, 32, 3, 2), nn.BatchNorm2d(32, track_running_stats=False), nn.ReLU(),
                    nn.Conv2d(32, 32, 3, 2), nn.BatchNorm2d(32, track_running_stats=False), nn.ReLU(), nn.Flatten(), nn.LazyLinear(5))
net(torch.rand(2, 1, 28, 28))
outer = torch.optim.Adam(net.parameters(), 1e-3)
def episode(ways=5, shots=5):
    cs = random.sample(range(100), ways)
    sup, qry = [], []
    for c in cs:
        pick = random.sample(range(20), 2 * shots)
        imgs = torch.stack([torch.rot90(data[c, k], random.randrange(4), (-2, -1)) for k in pick])
        sup.append(imgs[:shots]); qry.append(imgs[shots:])
    y = torch.arange(ways).repeat_interleave(shots)
    return torch.cat(sup), y, torch.cat(qry), y
for it in range(100000):
    outer.zero_grad()
    total = 0.0
    for task in range(4):
        xs, ys, xq, yq = episode()
        fast = dict(net.named_parameters())
        for inner in range(3):
            loss = F.cross_entropy(functional_call(net, fast, (xs,)), ys)
            grads = torch.autograd.grad(loss, fast.values(), create_graph=True)
            fast = {n: p - 0.4 * g for (n, p), g in zip(fast.items(), grads)}
        q = F.cross_entropy(functional_call(net, fast, (xq,)), yq) / 4
        q.backward()
        total += float(q)
    outer.step()
    if it % 100 == 0:
        print(it, total, flush=True)
