"""A script that sets its own number of threads, against the cores of its devices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from instrumented import dataset, instrumented, model, script_task
from nfold.core.variant import Variant
from nfold.explain.advice.caveats import MANY_THREADS
from nfold.instrument.rank_environment import oversubscription_note


@pytest.mark.parametrize(("threads", "told"), [(1, False), (2, True)])
def test_more_threads_than_cores_is_a_caveat(threads: int, *, told: bool) -> None:
    def training() -> None:
        torch.set_num_threads(threads)
        module = model()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for images, _ in DataLoader(dataset(400), batch_size=8):
            module(images).sum().backward()
            optimizer.step()

    before = torch.get_num_threads()
    try:
        found = instrumented(training, script_task()).samples
    finally:
        torch.set_num_threads(before)
    assert found is not None
    assert [kind for kind, _ in found.caveats] == [MANY_THREADS] * told


@pytest.mark.parametrize(
    ("variant", "changes", "told"),
    [
        (None, {}, "each of 2 processes uses 4 threads on 1 core;"),
        (Variant(independent=True), {}, "a single process uses 4 threads on 1 core;"),
        (None, {"cores_per_device": 3}, "on 3 cores;"),
        (None, {"cores_per_device": 4}, None),
        (Variant(threads=4), {}, None),
        (None, {"device": "cuda"}, None),
    ],
)
def test_thread_caveat_names_the_processes(
    variant: Variant | None, changes: dict[str, Any], told: str | None
) -> None:
    notes = oversubscription_note(script_task(variant, world_size=2, **changes), threads=4)
    assert len(notes) == (told is not None)
    assert told is None or told in notes[0][1]
