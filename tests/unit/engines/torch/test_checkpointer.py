"""A resumed trainer has its parameters, buffers, optimizer, loss scale, draws and epochs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import nn

from made import task
from nfold.core.errors import DataCorrupt
from nfold.core.measurement import Epoch, RankSamples, Window
from nfold.engines.base import Task
from nfold.engines.checkpoint_folder import newest_checkpoint, read_metadata
from nfold.engines.torch import layout
from nfold.engines.torch.checkpoint import Checkpointer, TrainingState

EPOCH = Epoch(seconds=1.0, samples=4, train_loss=0.3, accuracy=0.7)


def _state() -> TrainingState:
    layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5))
    module = layout.apply_layout(layers, "channels_last")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", enabled=True)
    return TrainingState(models=[module], optimizers=[optimizer], scaler=scaler)


def _step(state: TrainingState) -> float:
    (module,), (optimizer,) = state.models, state.optimizers
    scaler = cast(torch.amp.GradScaler, state.scaler)
    images = torch.ones(2, 3, 5, 5).contiguous(memory_format=torch.channels_last)
    loss: torch.Tensor = module(images).square().sum()
    scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return loss.item()


def _task(folder: Path, every: int = 1) -> Task:
    return dataclasses.replace(task(epochs=5), checkpoint=str(folder), checkpoint_every=every)


def _samples(epochs: int) -> RankSamples:
    window = Window(start_s=1.0, seconds=1.0, steps=1, samples=4)
    return RankSamples(
        rank=0,
        device="cpu",
        first_step_ms=3.0,
        windows=(window,),
        step_ms=(1.0,),
        epochs=(EPOCH,) * epochs,
        losses=((1, 0.5),),
        sample_hashes=((4, "00ff"),) * epochs,
    )


def test_another_process_resumes_exactly(tmp_path: Path) -> None:
    state, requested = _state(), _task(tmp_path)
    _step(state)
    Checkpointer(requested, state).save(_samples(2), 2)
    expected = [_step(state) for _ in range(3)]
    torch.manual_seed(1234)
    other = _state()
    earlier = Checkpointer(requested, other).resume()
    assert [_step(other) for _ in range(3)] == expected
    assert other.scaler is not None
    assert state.scaler is not None
    assert other.scaler.state_dict() == state.scaler.state_dict()
    for name, value in state.models[0].state_dict().items():
        assert torch.equal(other.models[0].state_dict()[name], value), name
    assert earlier.epochs == (EPOCH, EPOCH)
    assert earlier.losses == ((1, 0.5),)
    assert earlier.sample_hashes == ((4, "00ff"),) * 2
    assert (earlier.windows, earlier.step_ms, earlier.first_step_ms) == ((), (), None)


def test_the_optimizer_is_laid_out_like_its_parameters(tmp_path: Path) -> None:
    state = _state()
    _step(state)
    Checkpointer(_task(tmp_path), state).save(_samples(1), 1)
    other = _state()
    Checkpointer(_task(tmp_path), other).resume()
    for parameter, kept in other.optimizers[0].state.items():
        assert kept["momentum_buffer"].stride() == parameter.stride()


def test_every_second_epoch_and_the_last_are_saved_and_two_checkpoints_stay(tmp_path: Path) -> None:
    kept = Checkpointer(_task(tmp_path, every=2), _state())
    found = []
    for epoch in range(1, 6):
        kept.save(_samples(epoch), 10 * epoch)
        found.append(sorted(path.name for path in tmp_path.iterdir()))
    assert found[:3] == [[], ["step-20"], ["step-20"]]
    assert found[3:] == [["step-20", "step-40"], ["step-40", "step-50"]]
    last = newest_checkpoint(tmp_path)
    assert last is not None
    assert len(read_metadata(last).epochs) == 5


def test_training_resumes_from_the_newest_readable_checkpoint(tmp_path: Path) -> None:
    Checkpointer(_task(tmp_path), _state()).save(_samples(2), 20)
    (tmp_path / "step-30").mkdir()
    with pytest.warns(UserWarning, match="step-30 cannot be read; resuming from step-20"):
        earlier = Checkpointer(_task(tmp_path), _state()).resume()
    assert len(earlier.epochs) == 2


def test_only_damaged_checkpoints_are_refused(tmp_path: Path) -> None:
    (tmp_path / "step-30").mkdir()
    with pytest.raises(DataCorrupt, match="step-30"):
        Checkpointer(_task(tmp_path), _state()).resume()


def test_without_a_folder_nothing_is_saved() -> None:
    checkpointer = Checkpointer(task(epochs=1), _state())
    checkpointer.save(_samples(1), 1)
    assert checkpointer.resume() == RankSamples(rank=0, device="")


def test_an_empty_folder_is_begun_with(tmp_path: Path) -> None:
    checkpointer = Checkpointer(_task(tmp_path / "none"), _state())
    assert checkpointer.resume().epochs == ()
