"""Which tensors of a batch go to a device, and which stay."""

from __future__ import annotations

from typing import Any

import torch

from nfold.frameworks.torch.script.moves import Moves, derive
from nfold.frameworks.torch.script.patches import Patches
from nfold.frameworks.torch.script.replay import Replay
from nfold.frameworks.torch.script.tally import Tally
from nfold.frameworks.torch.script.tensors import install
from nfold.seen import Loader, Seen

META = torch.device("meta")


def batch() -> dict[str, Any]:
    return {
        "sound": torch.zeros(2, 8),
        "lengths": torch.tensor([8, 5]),
        "text": [torch.zeros(2, 3), torch.tensor([3, 1])],
    }


def moved(*names: str) -> Moves:
    """After a step in which these are moved, as a script does."""
    moves, patches, tally, given = Moves(), Patches(), Tally(), batch()
    install(patches, tally, moves.moved)
    tally.on = True
    moves.given(given)
    try:
        for name in names:
            one = given[name]
            (one[0] if isinstance(one, list) else one).float()[:, :2].to(META)
        torch.zeros(3).to(META)
    finally:
        patches.undo()
    return moves


def test_what_is_moved_itself_or_as_a_part_or_a_copy_goes() -> None:
    assert moved("sound", "text").stay == (1, 3)
    assert moved("text").stay == (0, 1, 3)


def test_where_nothing_was_seen_to_move_nothing_stays() -> None:
    assert moved().stay == ()


def test_a_tensor_that_is_gone_is_no_other_one() -> None:
    moves = Moves()
    moves.given([torch.zeros(2)])
    for _ in range(20):
        moves.moved(torch.zeros(2))
    assert moves.stay == ()


def test_what_gradients_go_through_is_no_copy_of_a_batch() -> None:
    source, made = torch.zeros(2), torch.zeros(2, requires_grad=True)
    derive(source, made)
    moves = Moves()
    moves.given([source])
    moves.moved(made)
    assert moves.stay == ()


def test_a_resident_batch_has_on_the_host_what_stays() -> None:
    replay = Replay(META, (1, 3))
    replay.collect(iter([batch()]), 1)
    given = replay.next()
    where = [one.device.type for one in (given["sound"], given["lengths"], *given["text"])]
    assert where == ["meta", "cpu", "meta", "cpu"]


def test_it_is_known_which_of_the_first_batches_is_there() -> None:
    replay = Replay(None)
    replay.collect(iter([batch(), batch()]), 2)
    places = []
    for _ in range(3):
        replay.next()
        places.append(replay.place)
    assert places == [0, 1, 0]


def test_later_runs_learn_what_a_first_look_showed() -> None:
    learnt = Seen(loader=Loader(batch=None, stay=(1,))).learnt
    assert (learnt.own_batches, learnt.stay) == (True, (1,))
    assert not Seen(loader=Loader(batch=8)).learnt.own_batches
