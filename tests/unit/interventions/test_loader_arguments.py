"""Arguments of a script's DataLoaders, and where they are refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from instrumented import dataset, instrumented, loop, model, overrides, script_task
from made import machine, plan
from nfold.core.errors import Unsupported, UsageError
from nfold.core.script_profile import DataLoaderProfile, HostToDeviceCopies, ScriptProfile
from nfold.core.source_edit import SetKeywords
from nfold.core.variant import Variant
from nfold.core.workload import Workload
from nfold.engines.torch.variant_support import refusal

SCRIPT = Workload(name="train.py", script=("train.py",))
HOST = machine(gpus=2, cores=2)
PIN = Variant(loader_pin_memory=True)
WORKERS = Variant(loader_persistent_workers=True, loader_prefetch_factor=4, loader_in_order=False)
ARGUMENTS = ("pin_memory", "persistent_workers", "prefetch_factor", "in_order")
FED = ScriptProfile(
    loader=DataLoaderProfile(
        num_workers=2, sampler="RandomSampler", created_at="train.py:31", prefetch_factor=2
    ),
    copies=HostToDeviceCopies(per_step=2.0),
)


def arguments(loader: DataLoader[Any]) -> tuple[Any, ...]:
    return tuple(getattr(loader, name) for name in ARGUMENTS)


def train(**settings: Any) -> DataLoader[Any]:
    module, loader = model(), DataLoader(dataset(), batch_size=8, shuffle=True, **settings)
    loop(loader, module, torch.optim.SGD(module.parameters()))
    return loader


@pytest.mark.parametrize(
    ("variant", "expected"),
    [
        (Variant(), (False, False, 2, True)),
        (PIN, (True, False, 2, True)),
        (WORKERS, (False, True, 4, False)),
        (PIN.merge(WORKERS), (True, True, 4, False)),
    ],
)
def test_a_loader_has_the_arguments_before_it_is_iterated(
    variant: Variant, expected: tuple[Any, ...]
) -> None:
    loader: DataLoader[Any] = DataLoader(dataset(), num_workers=1)
    overrides(script_task(variant))(loader)
    assert arguments(loader) == expected


def test_workers_of_the_plan_get_the_arguments() -> None:
    loader: DataLoader[Any] = DataLoader(dataset())
    overrides(script_task(WORKERS, workers=2))(loader)
    assert (loader.num_workers, *arguments(loader)) == (2, False, True, 4, False)


def test_a_loader_without_workers_keeps_what_pytorch_requires_there() -> None:
    loader: DataLoader[Any] = DataLoader(dataset())
    overrides(script_task(WORKERS))(loader)
    assert arguments(loader) == (False, False, None, True)


def test_a_script_without_the_loader_is_refused() -> None:
    with pytest.raises(Unsupported, match="prefetch_factor, in_order: no DataLoader with workers"):
        instrumented(train, script_task(WORKERS))
    with pytest.raises(Unsupported, match="pin_memory: no DataLoader feeds"):
        instrumented(train_without_loader, script_task(PIN))
    assert instrumented(train, script_task(PIN)).samples is not None


def train_without_loader() -> None:
    module, batches = model(), [dataset(8)[:]]
    loop(batches, module, torch.optim.SGD(module.parameters()))


@pytest.mark.parametrize(
    ("variant", "workload", "changes", "expected"),
    [
        (PIN, SCRIPT, {"device": "cpu"}, "no batch is copied"),
        (PIN, SCRIPT, {"workers": 0}, ""),
        (WORKERS, SCRIPT, {"workers": 0}, "no worker processes"),
        (WORKERS, SCRIPT, {"workers": 2}, ""),
        (WORKERS, Workload(name="digits"), {"workers": 2}, "workloads set the arguments"),
    ],
)
def test_a_refusal_has_a_reason(
    variant: Variant, workload: Workload, changes: dict[str, Any], expected: str
) -> None:
    requested = plan(HOST, **{"device": "cuda", "devices": 2, "strategy": "ddp", **changes})
    assert expected in (refusal(variant, workload, requested) or "")
    assert bool(refusal(variant, workload, requested)) == bool(expected)


def test_a_prefetch_factor_is_at_least_1() -> None:
    with pytest.raises(UsageError, match="loader_prefetch_factor 0"):
        Variant(loader_prefetch_factor=0)


def test_they_are_useful_to_scripts_with_such_loaders() -> None:
    assert useful(FED) == (True, True, True, True)
    assert useful(ScriptProfile()) == (False, False, False, False)
    assert useful(with_loader(num_workers=0)) == (True, False, False, False)
    assert useful(with_loader(pin_memory=True, persistent_workers=True)) == (
        False,
        False,
        True,
        True,
    )
    on_host = dataclasses.replace(FED, copies=HostToDeviceCopies())
    assert not Variant.loader_pin_memory.is_useful(on_host)


def test_an_order_that_may_have_a_meaning_stays() -> None:
    assert not Variant.loader_in_order.is_useful(with_loader(sampler="SequentialSampler"))
    assert not Variant.loader_in_order.is_useful(with_loader(num_workers=1))
    paired = dataclasses.replace(FED, companion_loaders=(DataLoaderProfile(),))
    assert not Variant.loader_in_order.is_useful(paired)


def test_the_line_of_the_loader_is_edited() -> None:
    expected = SetKeywords(
        location="train.py:31", function="DataLoader", keywords=(("prefetch_factor", "8"),)
    )
    assert Variant.loader_prefetch_factor.source_edits(8, FED) == (expected,)
    by_trainer = dataclasses.replace(FED, trainer="transformers")
    assert Variant.loader_prefetch_factor.source_edits(8, by_trainer) is None
    assert Variant.loader_pin_memory.source_edits(True, ScriptProfile()) is None


def with_loader(**changes: Any) -> ScriptProfile:
    assert FED.loader is not None
    return dataclasses.replace(FED, loader=dataclasses.replace(FED.loader, **changes))


def useful(profile: ScriptProfile) -> tuple[bool, ...]:
    remedies = (
        Variant.loader_pin_memory,
        Variant.loader_persistent_workers,
        Variant.loader_prefetch_factor,
        Variant.loader_in_order,
    )
    return tuple(each.is_useful(profile) for each in remedies)
