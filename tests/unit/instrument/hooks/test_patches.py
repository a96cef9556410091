"""The stack of patches, and its table in the documentation."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import parallel
from torch.utils import checkpoint

from instrumented import RecordingObserver, script_task
from nfold.core.variant import NO_INTERVENTIONS, Variant
from nfold.instrument.hooks.patches import (
    TRAINER_CLASSES,
    BatchFunctionDecorator,
    Patches,
    TrainerDetector,
    mark_parallelized,
)
from nfold.instrument.rank_environment import AffinityHook
from nfold.instrument.script_profiler import RUN_MODULE
from nfold.instrument.script_rank import ChildTrainingDetector
from nfold.instrument.session import InstrumentedRun
from test_architecture import ROOT


@pytest.fixture(autouse=True)
def empty_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    importlib.import_module(RUN_MODULE)  # else nothing of it is replaced
    monkeypatch.setattr(Patches, "stack", [])


OLDEST = "2.9"
Names = set[tuple[str, str]]


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of the table: its pairs of an owner and an attribute."""

    names: Names
    condition: str
    version: tuple[int, ...]

    @property
    def is_in_this_pytorch(self) -> bool:
        return self.version <= tuple(map(int, torch.__version__.split(".")[:2]))


def documented() -> list[Row]:
    rows = []
    for line in (ROOT / "docs" / "patches.md").read_text().splitlines():
        if re.fullmatch(r"\| `.*\| (run|warm-up|explain: \w+) \|( [\d.]+ \|)?", line):
            owners, attributes, _, condition, *version = line.strip("| ").split(" | ")
            names = itertools.product(
                *(re.findall("`(.+?)`", cell) for cell in (owners, attributes))
            )
            since = tuple(map(int, (version or [OLDEST])[0].split(".")))
            rows.append(Row(set(names), condition, since))
    return rows


def expected(*conditions: str) -> Names:
    rows = [row for row in documented() if row.is_in_this_pytorch]
    found = [row.names for row in rows if not conditions or row.condition in conditions]
    return set().union(*found)


def installed() -> Names:
    return {(owner_name(patch.owner, patch.name), patch.name) for patch in Patches.stack}


def owner_name(owner: Any, name: str) -> str:
    """Return the owner, or for a function that a module has imported, the module that defines it."""
    homes = (dist, checkpoint) if isinstance(owner, ModuleType) else ()
    found: str = next((home.__name__ for home in homes if hasattr(home, name)), owner.__name__)
    return found


@contextmanager
def instrumented_process(variant: Variant) -> Iterator[InstrumentedRun]:
    """Install all that a rank of a script installs; ``variant`` may be interleaved with another."""
    variants = (variant, NO_INTERVENTIONS) if variant else ()
    task = dataclasses.replace(script_task(variant, world_size=2), interleaved_variants=variants)
    patches, trainers = Patches(), TrainerDetector(1)
    decorator = BatchFunctionDecorator(["train.py:1 batches"] if variant else [])
    affinity = AffinityHook()
    affinity.install(patches)
    run = InstrumentedRun(task, RecordingObserver(), trainers, affinity)
    ChildTrainingDetector("train.py", lambda: False).install(patches)
    decorator.install()
    run.install()
    for name, action in trainers.import_actions(patches).items():
        class_name, method, _ = TRAINER_CLASSES[name]
        module = ModuleType(name)
        setattr(module, class_name, type(class_name, (), {method: lambda self: None}))
        action(module)
    mark_parallelized(patches, parallel)
    try:
        yield run
    finally:
        run.uninstall()
        decorator.uninstall()
        patches.undo()


def attributes(patches: Iterable[Any]) -> list[Any]:
    return [vars(patch.owner).get(patch.name) for patch in patches]


def test_documented_patches_are_those_of_a_run() -> None:
    with instrumented_process(NO_INTERVENTIONS) as run:
        patches = list(Patches.stack)
        assert installed() == expected("run", "warm-up")
        run._warm_up_patches.undo()
        assert installed() == expected("run")
    assert Patches.stack == []
    originals = {(id(p.owner), p.name): None if p.inherited else p.original for p in patches[::-1]}
    assert attributes(patches) == [originals[id(p.owner), p.name] for p in patches]


def test_documented_patches_are_those_of_all_variants() -> None:
    changed = Variant(
        exchange="none",
        synchronised_batch_norm=False,
        host_syncs=False,
        channels_last=True,
        threads=1,
        fused_optimizer=True,
        set_grads_to_none=True,
        non_blocking_copies=True,
        autocast_bf16=True,
        activation_checkpointing=False,
    )
    conditions = {row.condition.removeprefix("explain: ") for row in documented()}
    assert conditions == {"run", "warm-up", "input", *vars(changed)}
    with instrumented_process(changed):
        assert installed() == expected()


def test_inherited_attribute_is_deleted_and_groups_are_independent() -> None:
    class Base:
        def method(self) -> str:
            return "base"

    class Derived(Base): ...

    first, second = Patches(), Patches()
    first.wrap(Derived, "method", lambda original, self: "first " + original(self))
    second.wrap(Derived, "method", lambda original, self: "second " + original(self))
    assert Derived().method() == "second first base"
    second.undo()
    assert Derived().method() == "first base"
    first.undo()
    assert "method" not in vars(Derived)


def test_missing_attribute_is_not_patched() -> None:
    Patches().wrap(torch, "no_such_function", lambda original: None)
    assert Patches.stack == []
