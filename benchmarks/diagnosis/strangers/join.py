# Uneven ranks under Join; LSTM with state carried over chunks (truncated backpropagation).
import os, torch, torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP


class LM(nn.Module):
    def __init__(self, v=200, d=128):
        super().__init__()
        self.e = nn.Embedding(v, d)
        self.r = nn.LSTM(d, d, 2, batch_first=True)
        self.o = nn.Linear(d, v)

    def forward(self, x, s=None):
        h, s = self.r(self.e(x), s)
        return self.o(h), s


class Text(torch.utils.data.Dataset):
    def __init__(self, rank, n):
        self.x = torch.randint(0, 200, (n + 5 * rank, 16, 36), generator=torch.Generator().manual_seed(rank))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i, :, :-1], self.x[i, :, 1:]


def main():
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, local = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    dev = torch.device("cuda", local) if cuda else torch.device("cpu")
    model = DDP(LM().to(dev), device_ids=[local] if cuda else None)
    loader = torch.utils.data.DataLoader(Text(rank, 40), batch_size=None)
    opt = torch.optim.SGD(model.parameters(), lr=1.0)
    lossf = nn.CrossEntropyLoss()
    for epoch in range(200):
        state, total = None, 0.0
        with Join([model]):
            for i, (x, y) in enumerate(loader):
                x, y = x.to(dev), y.to(dev)
                if state is not None:
                    state = tuple(s.detach() for s in state)
                out, state = model(x, state)
                loss = lossf(out.reshape(-1, 200), y.reshape(-1))
                opt.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.25)
                opt.step()
                total += loss.item()
        if rank == 0:
            print(epoch, total / 40, flush=True)


main()
