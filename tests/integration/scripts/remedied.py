"""Train with DistributedDataParallel, and print what the remedies of nfold have changed."""

from __future__ import annotations

import gc
import json
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

REPORTED_STEP = 12
MARK = "facts "


def main() -> None:
    """Train endlessly."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(256, 64), torch.randint(0, 4, (256,)))
    loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data), num_workers=1)
    layers = nn.Sequential(
        nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.Linear(1024, 4)
    )
    model = DistributedDataParallel(layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    steps = 0
    while True:
        for samples, labels in loader:
            optimizer.zero_grad(set_to_none=False)
            deleted = all(parameter.grad is None for parameter in model.parameters())
            loss = nn.functional.cross_entropy(model(samples), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            steps += 1
            if steps == REPORTED_STEP:
                facts = {
                    "loss": loss.item(),
                    "persistent_workers": loader.persistent_workers,
                    "prefetch_factor": loader.prefetch_factor,
                    "in_order": loader.in_order,
                    "static_graph": model.static_graph,
                    "bucket_bytes": model.bucket_bytes_cap,
                    "fused": optimizer.defaults["fused"],
                    "deleted": deleted,
                    "full_collections": gc.get_threshold()[2],
                }
                sys.stdout.write(f"{MARK}{json.dumps(facts)}\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
