"""Which tensors of a batch go to a device, and which stay."""

from __future__ import annotations

from typing import Any

import torch

from nfold.core.script_profile import DataLoaderProfile, ScriptProfile
from nfold.instrument.hooks.patches import Patches
from nfold.instrument.hooks.runtime_hooks import EventCounter, install_tensor_hooks
from nfold.instrument.input.batch_tensors import BatchReplay, DeviceTransferTracker, record_source

META = torch.device("meta")


def batch() -> dict[str, Any]:
    return {
        "sound": torch.zeros(2, 8),
        "lengths": torch.tensor([8, 5]),
        "text": [torch.zeros(2, 3), torch.tensor([3, 1])],
    }


def moved(*names: str) -> DeviceTransferTracker:
    """After a step in which these are moved, as a script does."""
    moves, patches, tally, given = DeviceTransferTracker(), Patches(), EventCounter(), batch()
    install_tensor_hooks(patches, tally, moves.record_transfer)
    tally.enabled = True
    moves.record_batch(given)
    try:
        for name in names:
            one = given[name]
            (one[0] if isinstance(one, list) else one).float()[:, :2].to(META)
        torch.zeros(3).to(META)
    finally:
        patches.undo()
    return moves


def test_moved_views_and_copies_are_recorded() -> None:
    assert moved("sound", "text").host_tensors == (1, 3)
    assert moved("text").host_tensors == (0, 1, 3)


def test_without_transfers_no_tensor_stays_on_the_host() -> None:
    assert moved().host_tensors == ()


def test_reused_id_of_a_tensor_is_ignored() -> None:
    moves = DeviceTransferTracker()
    moves.record_batch([torch.zeros(2)])
    for _ in range(20):
        moves.record_transfer(torch.zeros(2))
    assert moves.host_tensors == ()


def test_tensor_that_requires_gradients_is_no_batch() -> None:
    source, made = torch.zeros(2), torch.zeros(2, requires_grad=True)
    record_source(source, made)
    moves = DeviceTransferTracker()
    moves.record_batch([source])
    moves.record_transfer(made)
    assert moves.host_tensors == ()


def test_resident_batch_keeps_host_tensors() -> None:
    replay = BatchReplay(META, (1, 3))
    replay.collect(iter([batch()]))
    given = replay.next()
    where = [one.device.type for one in (given["sound"], given["lengths"], *given["text"])]
    assert where == ["meta", "cpu", "meta", "cpu"]


def test_index_of_the_replayed_batch() -> None:
    replay = BatchReplay(None)
    replay.collect(iter([batch(), batch()]))
    places = []
    for _ in range(3):
        replay.next()
        places.append(replay.index)
    assert places == [0, 1, 0]


def test_profile_has_replay_hints() -> None:
    hints = ScriptProfile(loader=DataLoaderProfile(batch_size=None, host_tensors=(1,))).replay_hints
    assert (hints.script_sets_batch_size, hints.host_tensors) == (True, (1,))
    assert not ScriptProfile(
        loader=DataLoaderProfile(batch_size=8)
    ).replay_hints.script_sets_batch_size
