"""A character-level GPT on a file of tokens."""

import argparse
from itertools import islice

import torch
from data import TokenFile
from model import GPT
from torch.nn import functional
from torch.utils.data import DataLoader

import nfold

parser = argparse.ArgumentParser()
parser.add_argument("tokens", help="file of uint16 tokens")
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--steps", type=int, help="of an epoch; default: all")
parser.add_argument("--length", type=int, default=128)
parser.add_argument("--in-order", action="store_true", help="do not shuffle")
options = parser.parse_args()

run = nfold.Run()
torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
train = TokenFile(options.tokens, options.length)
model = GPT(length=options.length).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=10)
train_loader = DataLoader(train, batch_size=16, shuffle=not options.in_order, drop_last=True)
model, optimizer, schedule = run.prepare(model, optimizer, schedule)
train_loader = run.loader(train_loader)


@run.step
def train_step(input_ids, labels):
    optimizer.zero_grad()
    logits = model(input_ids)
    loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    return loss.detach()


for epoch in range(options.epochs):
    for step, batch in enumerate(islice(train_loader, options.steps)):
        loss = train_step(batch["input_ids"].to(device), batch["labels"].to(device))
        if step % 5 == 0:
            run.log(epoch=epoch, step=step, loss=run.mean(loss), **run.rate())
