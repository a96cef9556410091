# Cross-validation, 20 folds: a new model and a new optimizer for each, 15 steps.
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Subset, TensorDataset

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def cnn():
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, 1, 1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, 2, 1),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3, 2, 1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * 64, 10),
    )


ds = TensorDataset(torch.rand(1000, 3, 32, 32), torch.randint(0, 10, (1000,)))
folds = torch.arange(1000).chunk(20)
for again in range(100):
    for k, held_out in enumerate(folds):
        train = torch.cat([fold for j, fold in enumerate(folds) if j != k]).tolist()
        model = cnn().to(DEVICE)
        opt = torch.optim.Adam(model.parameters(), 1e-3)
        for x, y in DataLoader(Subset(ds, train), 64, shuffle=True):
            loss = nn.functional.cross_entropy(model(x.to(DEVICE)), y.to(DEVICE))
            opt.zero_grad()
            loss.backward()
            opt.step()
        with torch.no_grad():
            right = 0
            for x, y in DataLoader(Subset(ds, held_out.tolist()), 64):
                right += (model(x.to(DEVICE)).argmax(1).cpu() == y).sum().item()
        print(again, k, loss.item(), right / len(held_out), flush=True)
