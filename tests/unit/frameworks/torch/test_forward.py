"""A batch's way to its loss: in one piece or two, as written or compiled."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from made import task
from nfold.frameworks.torch.batch import Samples
from nfold.frameworks.torch.forward import Way, compiled, pieces_of, written
from nfold.frameworks.torch.precision import Precision


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 4), nn.ReLU(), nn.Linear(4, 40))


def _way() -> Way:
    return Way(
        unpack=lambda tensors: Samples(*tensors),
        prepare=lambda samples, epoch: samples.images.float() + epoch,
        loss=functional.cross_entropy,
        precision=Precision("fp32", torch.device("cpu")),
    )


def _batch() -> Samples:
    images = torch.arange(24, dtype=torch.uint8).view(2, 2, 2, 3)
    return Samples(images, torch.tensor([1, 3]), torch.tensor([0, 1]))


def test_one_device_or_an_eager_step_leaves_a_model_whole() -> None:
    model = _model()
    assert pieces_of(model, task(step="compiled")) == (model,)
    assert pieces_of(model, task(world_size=2)) == (model,)


def test_the_last_piece_holds_most_parameters_and_the_pieces_are_the_model() -> None:
    """52 numbers in the first layer, 200 in the last."""
    model = _model()
    first, last = pieces_of(model, task(world_size=2, step="compiled"))
    assert [*first.children(), *last.children()] == list(model)
    assert [p.numel() for p in last.parameters()] == [160, 40]


@pytest.mark.parametrize(
    "module", [nn.Linear(3, 4), nn.Sequential(nn.Linear(9, 9), nn.Linear(3, 2))]
)
def test_what_cannot_be_cut_well_stays_whole(module: nn.Module) -> None:
    assert pieces_of(module, task(world_size=2, step="compiled")) == (module,)


def test_the_epoch_reaches_the_model() -> None:
    forward = written(_way(), _model())
    losses = [forward(_batch(), torch.tensor(epoch)).item() for epoch in (0, 0, 1)]
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.parametrize("pieces", [1, 2])
def test_two_pieces_are_the_model(pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled runs as it is here; an integration test compiles."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    model = _model()
    expected = written(_way(), model)(_batch(), torch.tensor(2))
    parts = (model,) if pieces == 1 else (model[:2], model[2:])
    loss = compiled(_way(), parts, tuned=False)(_batch(), torch.tensor(2))
    assert torch.equal(loss, expected)
