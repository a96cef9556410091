"""A model, a data set and a loop of one's own: dictionaries, two losses, clipped gradients."""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import nfold

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=10)
options = parser.parse_args()


class Digits(Dataset):
    def __init__(self, part: slice) -> None:
        digits = load_digits()
        self.images = torch.tensor(digits.images[part], dtype=torch.float32) / 16
        self.labels = torch.tensor(digits.target[part])

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"image": self.images[index], "label": self.labels[index]}


class Reader(nn.Module):
    """Classifies an image and draws it again from what it kept of it."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.GELU())
        self.classifier = nn.Linear(128, 10)
        self.decoder = nn.Linear(128, 64)

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        kept = self.encoder(image)
        return {"logits": self.classifier(kept), "drawn": self.decoder(kept).view_as(image)}


torch.manual_seed(0)
run = nfold.Run()
train, test = Digits(slice(0, 1437)), Digits(slice(1437, None))
model = Reader()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
model, optimizer = run.prepare(model, optimizer)
train_loader = run.loader(DataLoader(train, batch_size=64, shuffle=True, drop_last=False))
test_loader = run.loader(DataLoader(test, batch_size=256), train=False)

for epoch in range(options.epochs):
    model.train()
    for batch in train_loader:
        optimizer.zero_grad()
        found = model(batch["image"])
        loss = functional.cross_entropy(found["logits"], batch["label"])
        loss = loss + 0.1 * functional.mse_loss(found["drawn"], batch["image"])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval()
    right = 0
    with torch.no_grad():
        for batch in test_loader:
            right += (model(batch["image"])["logits"].argmax(1) == batch["label"]).sum().item()
    run.log(epoch=epoch + 1, accuracy=run.sum(right) / len(test))
