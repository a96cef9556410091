"""ResNet on a folder of images."""

import argparse
from itertools import islice

import torch
from data import ImageFolder
from model import ResNet
from torch.nn import functional
from torch.utils.data import DataLoader

import nfold

parser = argparse.ArgumentParser()
parser.add_argument("folder", help="with the folders train and test")
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--steps", type=int, help="of an epoch; default: all")
parser.add_argument("--in-order", action="store_true", help="do not shuffle")
options = parser.parse_args()

run = nfold.Run()
torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
train, test = (ImageFolder(f"{options.folder}/{split}") for split in ("train", "test"))
model = ResNet(classes=len(train.classes)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs)
model, optimizer, schedule = run.prepare(model, optimizer, schedule)
train_loader = DataLoader(train, batch_size=64, shuffle=not options.in_order, num_workers=1)
train_loader = run.loader(train_loader)
test_loader = run.loader(DataLoader(test, batch_size=256), train=False)

for epoch in range(options.epochs):
    model.train()
    for step, (images, labels) in enumerate(islice(train_loader, options.steps)):
        images, labels = images.to(device), labels.to(device)
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            run.log(epoch=epoch, step=step, loss=run.mean(loss, count=len(labels)), **run.rate())
    schedule.step()

    model.eval()
    correct = 0
    with torch.no_grad():
        for images, labels in test_loader:
            images, labels = images.to(device), labels.to(device)
            correct += (model(images).argmax(1) == labels).sum().item()
    run.log(epoch=epoch, accuracy=run.sum(correct) / len(test))
