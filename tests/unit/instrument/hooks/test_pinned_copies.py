"""Copies of pinned memory that do not wait, decided without a GPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from made import machine, plan
from nfold.core.errors import Unsupported
from nfold.core.script_profile import HostToDeviceCopies, ScriptProfile, SourceLocation
from nfold.core.source_edit import SetKeywords
from nfold.core.variant import Variant
from nfold.instrument.hooks.patches import Patches
from nfold.instrument.hooks.pinned_copies import PinnedCopies

ON = Variant(non_blocking_copies=True)


class PinnedTensor(torch.Tensor):
    """A tensor of the CPU that takes itself for pinned."""

    def is_pinned(self, device: Any = None) -> bool:
        return True


@pytest.mark.parametrize(
    ("arguments", "keywords", "changed"),
    [
        (("cuda",), {}, True),
        ((torch.device("cuda", 1), torch.float16), {}, True),
        ((0,), {"copy": True}, True),
        ((), {"device": "cuda"}, True),
        (("cuda",), {"non_blocking": False}, False),
        (("cuda", torch.float16, False), {}, False),
        (("cpu",), {}, False),
        ((torch.float16,), {}, False),
        ((torch.zeros(1),), {}, False),
        ((), {"dtype": torch.float16}, False),
    ],
)
def test_pinned_memory_is_copied_to_a_gpu_without_waiting(
    arguments: tuple[Any, ...], keywords: dict[str, Any], *, changed: bool
) -> None:
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    copies = PinnedCopies(enabled=True)

    def original(_tensor: Any, *args: Any, **kwargs: Any) -> None:
        calls.append((args, kwargs))

    copies._to(original, torch.zeros(2), *arguments, **keywords)
    copies._to(original, torch.zeros(2).as_subclass(PinnedTensor), *arguments, **keywords)
    expected = {**keywords, "non_blocking": True} if changed else keywords
    assert calls == [(arguments, keywords), (arguments, expected)]
    assert copies.has_applied == changed


def test_methods_are_replaced_and_restored() -> None:
    patches, copies, before = Patches(), PinnedCopies(enabled=True), vars(torch.Tensor).get("to")
    copies.install(patches)
    try:
        assert torch.zeros(1).to(torch.float16).dtype == torch.float16
        assert {patch.name for patch in patches.stack if patch.patches is patches} == {"to", "cuda"}
    finally:
        patches.undo()
    assert vars(torch.Tensor).get("to") is before
    with pytest.raises(Unsupported, match="or none is pinned"):
        copies.require_applied()


def test_it_is_for_gpus_and_pinned_copies() -> None:
    host = machine(gpus=2, cores=2)
    assert "no batch is copied" in (ON.refusal(plan(host, device="cpu")) or "")
    assert ON.refusal(plan(host, device="cuda")) is None
    unpinned = ScriptProfile(copies=HostToDeviceCopies(per_step=2.0))
    assert not Variant.non_blocking_copies.is_useful(unpinned)
    copies = HostToDeviceCopies(per_step=2.0, pinned_per_step=2.0)
    assert not Variant.non_blocking_copies.is_useful(ScriptProfile(copies=copies))
    waiting = dataclasses.replace(copies, waiting_per_step=1.0)
    assert Variant.non_blocking_copies.is_useful(ScriptProfile(copies=waiting))


def test_lines_that_copy_in_a_step_are_edited() -> None:
    places = SourceLocation(line="train.py:8"), SourceLocation(line="train.py:9", per_step=2.0)
    profile = ScriptProfile(source_locations={"copy": places})
    expected = SetKeywords(
        location="train.py:9",
        function="to",
        keywords=(("non_blocking", "True"),),
        every_call=True,
    )
    assert Variant.non_blocking_copies.source_edits(True, profile) == (expected,)
