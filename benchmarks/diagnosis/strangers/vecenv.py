"""A2C with environments in processes of their own, pipes between them."""
import multiprocessing as mp
import time
import numpy as np
import torch
import torch.nn as nn

N, T, OBS, ACT = 4, 16, 24, 4


def worker(pipe, seed):
    rng = np.random.default_rng(seed)
    M = rng.standard_normal((OBS, OBS)) * 0.1
    s = rng.standard_normal(OBS)
    while True:
        cmd, a = pipe.recv()
        if cmd == "close":
            break
        for _ in range(20):
            s = np.tanh(M @ s + a * 0.01)
        pipe.send((s.astype(np.float32), float(s.sum()), bool(rng.random() < 0.01)))


class Envs:
    def __init__(self):
        self.pipes = []
        for i in range(N):
            ours, theirs = mp.Pipe()
            mp.Process(target=worker, args=(theirs, i), daemon=True).start()
            self.pipes.append(ours)

    def step(self, acts):
        for p, a in zip(self.pipes, acts):
            p.send(("step", int(a)))
        s, r, d = zip(*[p.recv() for p in self.pipes])
        return torch.from_numpy(np.stack(s)), torch.tensor(r), torch.tensor(d, dtype=torch.float32)


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(OBS, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh())
        self.pi, self.v = nn.Linear(128, ACT), nn.Linear(128, 1)

    def forward(self, x):
        h = self.body(x)
        return torch.distributions.Categorical(logits=self.pi(h)), self.v(h).squeeze(-1)


if __name__ == "__main__":
    dev = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    envs, net = Envs(), Policy().to(dev)
    opt = torch.optim.RMSprop(net.parameters(), 7e-4)
    s, _, _ = envs.step([0] * N)
    t0 = time.time()
    for it in range(1000000):
        logp, vals, rews, dones, ents = [], [], [], [], []
        for _ in range(T):
            dist_, v = net(s.to(dev))
            a = dist_.sample()
            s, r, d = envs.step(a.cpu().numpy())
            logp.append(dist_.log_prob(a)); vals.append(v); rews.append(r.to(dev)); dones.append(d.to(dev)); ents.append(dist_.entropy())
        with torch.no_grad():
            R = net(s.to(dev))[1]
        rets = []
        for r, d in zip(reversed(rews), reversed(dones)):
            R = r + 0.99 * R * (1 - d)
            rets.insert(0, R)
        adv = torch.stack(rets) - torch.stack(vals)
        loss = -(torch.stack(logp) * adv.detach()).mean() + 0.5 * adv.pow(2).mean() - 0.01 * torch.stack(ents).mean()
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        opt.step()
        if it % 200 == 0:
            print(it, f"{loss.item():.3f} {(it + 1) * N * T / (time.time() - t0):.0f} frames/s", flush=True)
