# Everything in memory, shuffled by hand; single device. How will two help?
import math, time
import torch

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(1)
N, D = 60000, 28 * 28
X = torch.rand(N, D, device=device)
y = torch.randint(0, 10, (N,), device=device)
W1 = (torch.randn(D, 512, device=device) / math.sqrt(D)).requires_grad_()
b1 = torch.zeros(512, device=device, requires_grad=True)
W2 = (torch.randn(512, 10, device=device) / math.sqrt(512)).requires_grad_()
b2 = torch.zeros(10, device=device, requires_grad=True)
params = [W1, b1, W2, b2]
lr, bs = 0.1, 256
for epoch in range(50):
    perm = torch.randperm(N, device=device)
    t0 = time.time()
    total = 0.0
    for i in range(0, N, bs):
        idx = perm[i : i + bs]
        xb, yb = X[idx], y[idx]
        h = (xb @ W1 + b1).relu()
        logits = h @ W2 + b2
        loss = torch.nn.functional.cross_entropy(logits, yb)
        loss.backward()
        with torch.no_grad():
            for p in params:
                p -= lr * p.grad
                p.grad.zero_()
        total += loss.item()
    print(f"epoch {epoch}: loss {total / (N / bs):.4f} ({time.time() - t0:.1f}s)", flush=True)
