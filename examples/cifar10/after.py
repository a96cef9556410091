"""CIFAR-10 on one device, as people write it: a data set that augments and a schedule."""

import argparse

import torch
from data import Cifar10
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

import nfold

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--samples", type=int, default=50000)
parser.add_argument("--batch", type=int, default=512)
options = parser.parse_args()


def stage(inputs: int, outputs: int) -> list[nn.Module]:
    layers = []
    for channels in (inputs, outputs, outputs):
        convolution = nn.Conv2d(channels, outputs, 3, padding=1, bias=False)
        layers += [convolution, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
    return layers


torch.manual_seed(0)
run = nfold.Run(precision="bf16")
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
train, test = Cifar10("train", options.samples), Cifar10("test", options.samples)
model = nn.Sequential(
    *stage(3, 64),
    nn.AvgPool2d(2),
    *stage(64, 128),
    nn.AvgPool2d(2),
    *stage(128, 256),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(256, 10),
).to(device)
optimizer = torch.optim.SGD(
    model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4
)
model, optimizer = run.prepare(model, optimizer)
train_loader = run.loader(DataLoader(train, batch_size=options.batch, shuffle=True))
test_loader = run.loader(DataLoader(test, batch_size=1000), train=False)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs * len(train_loader))

for epoch in range(options.epochs):
    model.train()
    for images, labels in train_loader:
        images, labels = images.to(device), labels.to(device)
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        schedule.step()
    model.eval()
    right = 0
    with torch.no_grad():
        for images, labels in test_loader:
            images, labels = images.to(device), labels.to(device)
            right += (model(images).argmax(1) == labels).sum().item()
    run.log(epoch=epoch + 1, accuracy=run.sum(right) / len(test))
