# Streaming: an IterableDataset split over ranks and workers, shuffled by a buffer, packed to sequences; accumulation with no_sync.
import contextlib, os, random, torch, torch.nn as nn, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import IterableDataset, DataLoader, get_worker_info


class Packed(IterableDataset):
    def __init__(self, rank, world, length=64):
        self.rank, self.world, self.length = rank, world, length

    def documents(self):
        info = get_worker_info()
        k, n = (info.id, info.num_workers) if info else (0, 1)
        g = random.Random(self.rank * n + k)
        while True:
            yield [g.randrange(1000) for _ in range(g.randrange(20, 300))]

    def __iter__(self):
        buf, held = [], []
        for doc in self.documents():
            held.append(doc)
            if len(held) < 50:
                continue
            buf += held.pop(random.randrange(len(held))) + [0]
            while len(buf) > self.length:
                yield torch.tensor(buf[: self.length + 1])
                buf = buf[self.length + 1 :]


class LM(nn.Module):
    def __init__(self, d=96):
        super().__init__()
        self.e = nn.Embedding(1000, d)
        self.t = nn.TransformerEncoder(nn.TransformerEncoderLayer(d, 4, 4 * d, 0.1, batch_first=True, norm_first=True), 2)
        self.h = nn.Linear(d, 1000)

    def forward(self, x):
        m = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        return self.h(self.t(self.e(x), m, is_causal=True))


def main():
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    r, w = dist.get_rank(), dist.get_world_size()
    dev = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    torch.manual_seed(0)
    net = DDP(LM().to(dev))
    opt = torch.optim.AdamW(net.parameters(), 3e-4)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda n: min(1, (n + 1) / 100))
    dl = DataLoader(Packed(r, w), 8, num_workers=1)
    accumulate = 4
    for step, x in enumerate(dl):
        x = x.to(dev)
        last = (step + 1) % accumulate == 0
        with contextlib.nullcontext() if last else net.no_sync():
            out = net(x[:, :-1])
            loss = nn.functional.cross_entropy(out.flatten(0, 1), x[:, 1:].flatten()) / accumulate
            loss.backward()
        if last:
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            opt.step()
            sched.step()
            opt.zero_grad()
            if step % 400 == 399 and r == 0:
                print(step, float(loss), flush=True)


main()
