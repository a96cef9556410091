"""nfold's step with a part of its gradient exchange or input taken away, to see what it costs.

``without=exchange``: every rank trains a copy of its own. ``without=sending``: gradients are
gathered into buckets and stay there. ``without=bytes``: one number of each bucket is sent.
``without=loading``: the first batches again, from the host; ``without=input``: from the device.
``ctas=N`` lets NCCL use at most N thread blocks. The other fields are those of a plan.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import nfold_arm
from job import Job, run

from nfold.core.variant import Variant

PARTS = ("exchange", "sending", "bytes")
INPUTS = {"loading": Variant(input="replayed"), "input": Variant(input="resident")}


def main(job: Job) -> None:
    without, ctas = job.fields.pop("without", None), job.fields.pop("ctas", None)
    if without not in (None, *PARTS, *INPUTS):
        raise ValueError(f"without={without!r}; allowed are {', '.join((*PARTS, *INPUTS))}")
    if ctas is not None:
        os.environ["NCCL_MAX_CTAS"] = ctas
    if without in PARTS:
        take_away(without)
    nfold_arm.main(job, INPUTS.get(without))


def take_away(part: str) -> None:
    """Replace what the exchange calls, before a step is built."""
    from nfold.engines.torch.communication import data_parallel, gradient_exchange

    if part == "exchange":
        no_exchange = SimpleNamespace(overlap_optimizer=lambda _: None)
        vars(data_parallel)["GradientExchange"] = lambda *_, **__: no_exchange
        return
    distributed = gradient_exchange.dist

    def all_reduce(values: Any, **how: Any) -> Any:
        if part == "sending":
            return SimpleNamespace(wait=lambda: None)
        return distributed.all_reduce(values[:1], **how)

    gradient_exchange.dist = SimpleNamespace(ReduceOp=distributed.ReduceOp, all_reduce=all_reduce)


if __name__ == "__main__":
    run(main)
