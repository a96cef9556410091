"""Several steps in one call: consecutive batches of one form, which one graph goes through.

Between two graphs a GPU waits for the copies of what they read and return and for the start of
the second, about 25 µs on an H200; between two steps of one graph it does not.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator

from torch import Tensor

from nfold.frameworks.torch.batch import Batch, form

Chain = tuple[Batch, ...]


def chains(batches: Iterable[Batch], most: int, *, apart: int = 0) -> Iterator[Chain]:
    """All batches in their order: the first ``apart`` alone, then ``most`` alike ones at a time.

    Those that have too few alike beside them, such as the last ones of an epoch, come alone.
    """
    held: list[Batch] = []
    for number, batch in enumerate(batches):
        if held and _form(held[0]) != _form(batch):
            yield from _alone(held)
        held.append(batch)
        if number < apart:
            yield from _alone(held)
        elif len(held) == most:
            yield tuple(held)
            held.clear()
    yield from _alone(held)


def _alone(held: list[Batch]) -> Iterator[Chain]:
    """Each for itself; nothing is held afterwards."""
    yield from ((batch,) for batch in held)
    held.clear()


def _form(batch: Batch) -> Hashable:
    """What batches of one chain have in common."""
    epoch = id(batch.epoch) if isinstance(batch.epoch, Tensor) else batch.epoch
    return tuple(map(form, batch.tensors)), epoch, batch.count, batch.global_count
