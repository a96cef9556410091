"""The forward pass in one piece or several."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional

from made import task
from nfold.engines.torch.batch import SampleTensors
from nfold.engines.torch.precision import Precision
from nfold.engines.torch.step.forward import (
    ForwardPass,
    compiled_forward,
    eager_forward,
    split_module,
)


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 4), nn.ReLU(), nn.Linear(4, 40))


def _way() -> ForwardPass:
    return ForwardPass(
        unpack=lambda tensors: SampleTensors(*tensors),
        prepare=lambda samples, epoch: samples.images.float() + epoch,
        loss=functional.cross_entropy,
        precision=Precision("fp32", torch.device("cpu")),
    )


def _batch() -> SampleTensors:
    images = torch.arange(24, dtype=torch.uint8).view(2, 2, 2, 3)
    return SampleTensors(images, torch.tensor([1, 3]), torch.tensor([0, 1]))


def test_one_device_or_an_eager_step_leaves_a_model_whole() -> None:
    model = _model()
    assert split_module(model, task(step="compiled")) == (model,)
    assert split_module(model, task(world_size=2)) == (model,)


def test_pieces_grow_and_are_the_model() -> None:
    """12 numbers, 90, 1,000: at most a twentieth in the first piece, a quarter in the first two."""
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(8, 10), nn.Linear(9, 100))
    pieces = split_module(model, task(world_size=2, step="compiled"))
    assert [child for piece in pieces for child in piece.children()] == list(model)
    assert [sum(p.numel() for p in piece.parameters()) for piece in pieces] == [12, 90, 1000]


def test_where_a_first_piece_would_be_empty_there_is_one_less() -> None:
    """52 numbers in the first layer, 200 in the last."""
    pieces = split_module(_model(), task(world_size=2, step="compiled"))
    assert [sum(p.numel() for p in piece.parameters()) for piece in pieces] == [52, 200]


@pytest.mark.parametrize(
    "module", [nn.Linear(3, 4), nn.Sequential(nn.Linear(9, 9), nn.Linear(3, 2))]
)
def test_what_cannot_be_cut_well_stays_whole(module: nn.Module) -> None:
    assert split_module(module, task(world_size=2, step="compiled")) == (module,)


def test_the_epoch_reaches_the_model() -> None:
    forward = eager_forward(_way(), _model())
    losses = [forward(_batch(), torch.tensor(epoch)).item() for epoch in (0, 0, 1)]
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.parametrize("ends", [[], [2], [2, 3]])
def test_the_pieces_make_what_the_model_makes(
    ends: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is compiled runs as it is here; an integration test compiles."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    model = _model()
    expected = eager_forward(_way(), model)(_batch(), torch.tensor(2))
    parts = tuple(model[a:b] for a, b in itertools.pairwise([0, *ends, len(model)]))
    loss = compiled_forward(_way(), parts, tuned=False)(_batch(), torch.tensor(2))
    assert torch.equal(loss, expected)
