"""The remedy that keeps a process on the cores of its start."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from nfold.core.script_profile import ScriptProfile, SourceLocation
from nfold.core.variant import Variant
from nfold.instrument.hooks.patches import Patches
from nfold.instrument.hooks.start_cores import StartCores

ALL = set(os.sched_getaffinity(0))


@pytest.fixture
def patches() -> Iterator[Patches]:
    if len(ALL) < 2:
        pytest.skip("needs two cores")
    StartCores.record()
    patches = Patches()
    yield patches
    patches.undo()
    os.sched_setaffinity(0, ALL)
    StartCores.cores = frozenset()


def test_the_script_cannot_bind_its_process(patches: Patches) -> None:
    cores = StartCores(enabled=True)
    cores.install(patches)
    os.sched_setaffinity(0, {min(ALL)})
    assert os.sched_getaffinity(0) == ALL
    cores.on_first_step()
    assert cores.has_applied


def test_threads_that_a_library_has_bound_are_bound_again(patches: Patches) -> None:
    ready, done = threading.Event(), threading.Event()

    def work() -> None:
        os.sched_setaffinity(0, {min(ALL)})
        ready.set()
        done.wait()

    thread = threading.Thread(target=work)
    thread.start()
    ready.wait()
    assert os.sched_getaffinity(thread.native_id or 0) == {min(ALL)}
    StartCores(enabled=True).install(patches)
    assert os.sched_getaffinity(thread.native_id or 0) == ALL
    done.set()
    thread.join()


def test_a_process_that_nothing_binds_stays_as_it_is(patches: Patches) -> None:
    for cores in (StartCores(enabled=True), StartCores(enabled=False)):
        cores.install(patches)
        cores.on_first_step()
        assert not cores.has_applied
        assert os.sched_getaffinity(0) == ALL


def test_it_is_tried_where_something_binds_the_ranks() -> None:
    remedy = Variant.restored_affinity
    line = (SourceLocation(line="train.py:3"),)
    assert not remedy.is_useful(ScriptProfile())
    assert remedy.is_useful(ScriptProfile(shared_cores=1))
    assert remedy.is_useful(ScriptProfile(source_locations={"affinity": line}))
    assert remedy.source_edits(True, ScriptProfile(shared_cores=1)) is None
