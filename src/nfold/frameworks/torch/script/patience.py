"""A run of passes that are cut short ends early where what lies between them takes long."""

from __future__ import annotations

import time

import torch.distributed as dist
from torch.distributed import distributed_c10d

from nfold.frameworks.base import Task
from nfold.frameworks.torch.script.facts import joined
from nfold.frameworks.torch.script.late import PUBLIC, TIMEOUT
from nfold.frameworks.torch.script.turning import length_of

LONG_S = 5.0
"""Between two passes. A run holds that three times, one on N devices and one on one device each."""
KEY = "over"


class Patience:
    """Ends such a run with its first timed pass, on all ranks alike; does nothing in other runs.

    What has passed before that one is a validation, most often, and no other will be waited for.
    The first timed step is when ranks decide, each as far as the others: rank 0 does, by its clock.
    """

    def __init__(self, task: Task) -> None:
        self._passes_are_cut = task.left_out.pass_batches is not None
        self._pass_steps = length_of(task).warmup
        self._stepped_at = 0.0
        self._over = False

    def over(self, steps: int) -> bool:
        """Whether step ``steps``, which has just been made, was the last one. Ask after each."""
        if not self._passes_are_cut:
            return False
        before, self._stepped_at = self._stepped_at, time.monotonic()
        if steps == self._pass_steps + 1:
            self._over = _agreed(self._stepped_at - before > LONG_S)
        return self._over and steps >= 2 * self._pass_steps


def _agreed(own: bool) -> bool:
    """What rank 0 thinks."""
    if not joined():
        return own
    store = PUBLIC.PrefixStore("nfold-patience", distributed_c10d._get_default_store())
    if dist.get_rank() == 0:
        store.set(KEY, str(own))
        return own
    store.wait([KEY], TIMEOUT)
    return bool(store.get(KEY) == str(True).encode())
