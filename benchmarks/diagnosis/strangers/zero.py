# ZeRO-1 by ZeroRedundancyOptimizer; metrics gathered as objects every step; a set of checkpoints in a thread.
import os, threading, torch, torch.nn as nn, torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import TensorDataset, DataLoader, DistributedSampler


def save(state, path):
    torch.save(state, path)


def main():
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    r = dist.get_rank()
    l = int(os.environ["LOCAL_RANK"])
    dev = torch.device("cuda", l) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(dev)
    net = DDP(
        nn.Sequential(nn.Linear(512, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 64)).to(dev),
        device_ids=[l] if cuda else None,
    )
    opt = ZeroRedundancyOptimizer(net.parameters(), optimizer_class=torch.optim.Adam, lr=1e-3)
    ds = TensorDataset(torch.randn(16000, 512), torch.randint(0, 64, (16000,)))
    s = DistributedSampler(ds)
    dl = DataLoader(ds, 128, sampler=s)
    step = 0
    for ep in range(1000):
        s.set_epoch(ep)
        for x, y in dl:
            out = net(x.to(dev))
            loss = nn.functional.cross_entropy(out, y.to(dev))
            opt.zero_grad()
            loss.backward()
            opt.step()
            step += 1
            stats = [None] * dist.get_world_size()
            dist.all_gather_object(
                stats, {"loss": loss.item(), "acc": (out.argmax(1) == y.to(dev)).float().mean().item(), "rank": r}
            )
            if step % 100 == 0 and r == 0:
                print(step, sum(m["loss"] for m in stats) / len(stats), flush=True)
                threading.Thread(
                    target=save, args=({k: v.clone() for k, v in net.module.state_dict().items()}, f"ck_{step}.pt")
                ).start()


main()
