"""How a script can send less between its devices, with the line of its own code."""

from __future__ import annotations

from nfold.explain import wording
from nfold.explain.lines import at
from nfold.seen import Seen


def less(seen: Seen, *, tried_half: bool = False) -> str:
    """Fewer gradient bytes; ``tried_half``: half of them were sent, and it is no faster."""
    if seen.parallel == "fsdp":
        return (
            "shard less (reshard_after_forward=False), or not at all: DistributedDataParallel, if "
            "the model fits a device"
        )
    if seen.parallel != "ddp":
        own = seen.first("collective")
        by_hand = seen.parallel == "other" and own is not None and own.inside is None
        text = f"{_wrapped(seen)}; or " * by_hand
        return at(seen.first_place("collective"), f"{text}send less: bf16, or less often")
    words = wording.of(seen)
    if seen.sparse_gradient_bytes:
        return at(words.place(seen, "wrapper"), _dense(seen))
    said = half(seen)
    if said and not tried_half:
        return said
    why = " (half of the bytes: no gain beyond the noise)" if tried_half else ""
    return at(words.place(seen, "wrapper"), f"{words.less_sent}{why}")


def half(seen: Seen) -> str:
    """Half of the gradient bytes, "" where there is no setting that sends them.

    DistributedDataParallel has a hook that sends bf16 for NCCL alone.
    """
    words = wording.of(seen)
    if not (words.half and seen.sends_whole):
        return ""
    kind = "bf16" if seen.backend == "nccl" else "fp16"
    return at(words.place(seen, "wrapper"), words.half.format(kind, kind.upper()))


def _wrapped(seen: Seen) -> str:
    """What a wrapper does better than a collective for each gradient, even one behind backward."""
    each = max((one.per_step for one in seen.collectives), default=0.0)
    many = f" ({each:.0f} collectives a step here)" * (each > 1)
    return f"DistributedDataParallel, which sends buckets while backward goes on{many}"


def _dense(seen: Seen) -> str:
    """Sparse gradients of all ranks are gathered on each; no hook halves them."""
    size = f"{seen.sparse_gradient_bytes / 1e6:,.2f} MB"
    return (
        f"every rank gathers the sparse gradients of all: sparse=False sends {size} a step, which "
        "rings add up on their way"
    )
