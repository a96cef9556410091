"""Repairs of a gradient exchange at the same batch size: fewer collectives, or fewer rows."""

from __future__ import annotations

from collections.abc import Sequence

from nfold.core.format import join_words
from nfold.core.script_profile import SHARDED, CollectiveUse, RowGradient, ScriptProfile
from nfold.explain.advice.pytorch import at_event, at_location

MIN_COLLECTIVES = 8  # per step, from one line
MAX_BYTES = 1e6  # of a collective: the bytes of a larger one cost more than its latency
MIN_UNCHANGED_FRACTION = 0.3  # of the exchanged bytes
MAX_NAMES = 3
DENSE_OPTIMIZERS = ("Adam", "AdamW", "NAdam", "RAdam", "Adamax")


def many_collectives(profile: ScriptProfile) -> CollectiveUse | None:
    """Return the collective that a line of the script calls for many small tensors, or None."""
    own = profile.most_frequent("collective")
    if own is None or own.package_line is not None or profile.parallel in SHARDED:
        return None
    small = [c for c in profile.collectives if c.bytes_per_step < MAX_BYTES * c.per_step]
    most = max(small, key=lambda one: one.per_step, default=None)
    return most if most is not None and most.per_step >= MIN_COLLECTIVES else None


def unchanged_rows(profile: ScriptProfile) -> Sequence[RowGradient]:
    """Return the exchanged gradients of which a step changes few rows, if they are a large part."""
    rows = profile.row_gradients if profile.parallel in ("ddp", "other") else ()
    large = sum(row.bytes for row in rows) > MIN_UNCHANGED_FRACTION * profile.parameter_bytes > 0
    return rows if large else ()


def repair_exchange(profile: ScriptProfile) -> str:
    """Return what makes the exchange cheaper at the same batch size, "" if nothing is known."""
    return _exchange_fewer_rows(profile) or _bucket_collectives(profile)


def describe_exchange(profile: ScriptProfile) -> str:
    """``78 all_reduce calls per step``; empty for a usual exchange."""
    if rows := unchanged_rows(profile):
        part = sum(row.bytes for row in rows) / profile.parameter_bytes
        return f"{part:.0%} of its bytes are {_names(rows)}"
    many = many_collectives(profile)
    return f"{many.per_step:.0f} {many.name} calls per step" if many is not None else ""


def _bucket_collectives(profile: ScriptProfile) -> str:
    many = many_collectives(profile)
    if many is None:
        return ""
    size = many.bytes_per_step / many.per_step / 1e3
    calls = f"{many.per_step:.0f} {many.name} calls per step of {size:,.1f} kB each"
    change = "one call for all tensors (torch.cat)"
    if profile.parallel == "other" and 2 * many.bytes_per_step > profile.parameter_bytes:
        change = "one all_reduce of all gradients (torch.cat), or DistributedDataParallel, which "
        change += "all-reduces buckets during backward"
    line = profile.most_frequent_line("collective")
    return at_location(line, f"{change}; {calls} cost their latency, not their bytes")


def _exchange_fewer_rows(profile: ScriptProfile) -> str:
    rows = unchanged_rows(profile)
    if not rows:
        return ""
    part = sum(row.bytes for row in rows) / profile.parameter_bytes
    changed = sum(row.bytes * row.changed_fraction for row in rows) / sum(r.bytes for r in rows)
    why = (
        f"{_names(rows)}: {part:.0%} of the exchanged bytes, but a step changes {changed:.1%} of "
        "the rows"
    )
    if profile.backend == "gloo":
        dense = next((name for name in profile.optimizers if name in DENSE_OPTIMIZERS), None)
        also = f" and SparseAdam in place of {dense}" if dense else ""
        change = f"nn.Embedding(..., sparse=True){also}"
    else:
        change = (
            "exchange the changed rows only (all_gather of indices and rows), or shard the table"
        )
    return at_event(profile, "wrapper", f"{change}, or a smaller vocabulary; {why}")


def _names(rows: Sequence[RowGradient]) -> str:
    shown = [row.name for row in rows[:MAX_NAMES]]
    more = len(rows) - len(shown)
    return join_words([*shown, f"{more} others"] if more else shown)
