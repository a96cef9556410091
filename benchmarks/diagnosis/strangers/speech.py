# A speech recogniser: sequences of many lengths, padded per batch, CTC, an LSTM.
import os
import random

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Speech(Dataset):
    def __init__(self, n=2000):
        rng = random.Random(3)
        self.seconds = [rng.uniform(0.3, 1.6) for _ in range(n)]
        self.text = [[rng.randrange(1, 28) for _ in range(max(3, int(s * 8)))] for s in self.seconds]

    def __len__(self):
        return len(self.seconds)

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        wave = torch.randn(int(self.seconds[i] * 8000), generator=g)
        spec = torch.stft(wave, 256, 80, window=torch.hann_window(256), return_complex=True).abs()
        return torch.log1p(spec[:64]).T, torch.tensor(self.text[i])


class Buckets:
    def __init__(self, data, size):
        self.size, self.epoch = size, 0
        self.order = sorted(range(len(data)), key=lambda i: data.seconds[i])
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.batches = [self.order[i:i + size] for i in range(0, len(self.order), size)]

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return len(self.batches) // self.world

    def __iter__(self):
        b = list(self.batches)
        random.Random(self.epoch).shuffle(b)
        return iter(b[self.rank:len(self) * self.world:self.world])


def collate(batch):
    batch.sort(key=lambda b: -len(b[0]))
    x = pad_sequence([b[0] for b in batch], batch_first=True)
    y = pad_sequence([b[1] for b in batch], batch_first=True)
    return x, torch.tensor([len(b[0]) for b in batch]), y, torch.tensor([len(b[1]) for b in batch])


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.front = nn.Conv1d(64, 96, 5, stride=2, padding=2)
        self.rnn = nn.LSTM(96, 96, 2, batch_first=True, bidirectional=True)
        self.out = nn.Linear(192, 28)

    def forward(self, x, n):
        x = F.relu(self.front(x.transpose(1, 2))).transpose(1, 2)
        n = (n + 1) // 2
        x, _ = self.rnn(pack_padded_sequence(x, n.cpu(), batch_first=True))
        x, _ = pad_packed_sequence(x, batch_first=True)
        return F.log_softmax(self.out(x), -1), n


def main():
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    local = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    torch.manual_seed(0)
    data = Speech()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_sampler=Buckets(data, 16), collate_fn=collate, num_workers=1, pin_memory=cuda)
    model = DDP(Model().to(device), device_ids=[local] if cuda else None)
    opt = torch.optim.AdamW(model.parameters(), 3e-4)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, 3e-4, epochs=50, steps_per_epoch=len(loader))
    for epoch in range(50):
        loader.batch_sampler.set_epoch(epoch)
        model.train()
        for step, (x, n, y, m) in enumerate(loader):
            x, y = x.to(device), y.to(device)
            logp, n = model(x, n)
            loss = F.ctc_loss(logp.transpose(0, 1), y, n, m, zero_infinity=True)
            opt.zero_grad()
            loss.backward()
            grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if torch.isnan(grad_norm):
                print("grad norm is nan. Do not update model.")
            else:
                opt.step()
            sched.step()
            if dist.get_rank() == 0 and step % 20 == 0:
                print(f"epoch {epoch} step {step} loss {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    main()
