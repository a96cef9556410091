"""Two ranks with FSDP2 and without communication: ``fsdp2_removed.py FOLDER``.

Both ranks make one step with communication. Then rank 1 ends, and rank 0 makes three more steps
with the collectives removed, which would fail if one of them were real.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from instrumented import script_task
from integration.scripts.fsdp2 import WIDTH, sharded_model
from nfold.core.variant import Variant
from nfold.engines.interleaver import ActiveVariant
from nfold.instrument.hooks.distributed_hooks import CollectiveHooks
from nfold.instrument.hooks.patches import Patches
from nfold.instrument.hooks.runtime_hooks import EventCounter
from nfold.launch.rank_lifecycle import exit_after_handlers


def main(folder: Path) -> None:
    collectives = CollectiveHooks(
        ActiveVariant(script_task(Variant(exchange="none"))), EventCounter()
    )
    collectives.install(Patches(), Patches())
    dist.init_process_group("gloo")
    model = sharded_model()
    model(torch.ones(4, WIDTH)).sum().backward()
    collectives.on_first_step()
    if dist.get_rank():
        return
    for _ in range(3):
        model(torch.ones(4, WIDTH)).sum().backward()
    shapes = [tuple(p.grad.to_local().shape) for p in model.parameters()]  # type: ignore[union-attr]
    (folder / "shapes").write_text(repr(shapes))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    exit_after_handlers()
