# Physics-informed network: L-BFGS with a closure, second derivatives, points drawn anew every 20 steps.
import torch, torch.nn as nn
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
opt = torch.optim.LBFGS(net.parameters(), lr=0.5, max_iter=8, history_size=20, line_search_fn="strong_wolfe")
def points(n=2000):
    return torch.rand(n, 2, requires_grad=True)
p, b = points(), torch.rand(400, 2)
for it in range(100000):
    if it % 20 == 0:
        p = points()
    def closure():
        opt.zero_grad()
        u = net(p)
        g, = torch.autograd.grad(u.sum(), p, create_graph=True)
        gx, = torch.autograd.grad(g[:, 0].sum(), p, create_graph=True)
        gy, = torch.autograd.grad(g[:, 1].sum(), p, create_graph=True)
        loss = ((gx[:, 0] + gy[:, 1] - torch.sin(p).sum(1)) ** 2).mean() + (net(b) ** 2).mean()
        loss.backward()
        return loss
    l = opt.step(closure)
    if it % 50 == 0:
        print(it, float(l), flush=True)
