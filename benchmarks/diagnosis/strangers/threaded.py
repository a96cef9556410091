# Own prefetching thread + queue, single GPU. Regression on sensor windows.
import queue
import threading
import time

import numpy as np
import torch
import torch.nn as nn

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BATCH = 128
rng = np.random.default_rng(0)
signal = np.cumsum(rng.standard_normal((200000, 8)).astype(np.float32), axis=0)


class Prefetcher(threading.Thread):
    def __init__(self, depth=4):
        super().__init__(daemon=True)
        self.q = queue.Queue(depth)
        self.start()

    def run(self):
        local = np.random.default_rng(1)
        while True:
            at = local.integers(0, len(signal) - 256, BATCH)
            x = np.stack([signal[a:a + 256].T for a in at])
            x = (x - x.mean(-1, keepdims=True)) / (x.std(-1, keepdims=True) + 1e-6)
            spectrum = np.abs(np.fft.rfft(x, axis=-1))[:, :, :64].astype(np.float32)
            y = signal[at + 255, 0] - signal[at + 200, 0]
            self.q.put((torch.from_numpy(x), torch.from_numpy(spectrum), torch.from_numpy(y)))

    def next(self):
        return self.q.get()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Sequential(nn.Conv1d(8, 32, 7, 2, 3), nn.GELU(), nn.Conv1d(32, 32, 7, 2, 3), nn.GELU(),
                               nn.AdaptiveAvgPool1d(4), nn.Flatten())
        self.b = nn.Sequential(nn.Flatten(), nn.Linear(8 * 64, 128), nn.GELU())
        self.out = nn.Linear(32 * 4 + 128, 1)

    def forward(self, x, s):
        return self.out(torch.cat([self.a(x), self.b(s)], 1)).squeeze(1)


model = Net().to(DEVICE)
opt = torch.optim.AdamW(model.parameters(), 1e-3)
loss_fn = nn.HuberLoss()
batches = Prefetcher()
t0, seen = time.time(), 0
for step in range(1, 200001):
    x, s, y = (t.to(DEVICE) for t in batches.next())
    opt.zero_grad()
    loss = loss_fn(model(x, s), y)
    loss.backward()
    opt.step()
    seen += len(y)
    if step % 100 == 0:
        print(f"{step} loss {loss.item():.4f} {seen / (time.time() - t0):.0f} samples/s", flush=True)
