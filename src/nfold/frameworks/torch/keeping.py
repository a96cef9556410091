"""Keeping a training at the end of its epochs, and going on from what was kept, exactly.

What is kept is all that the next epoch depends on: parameters and buffers, the optimizer, the
scale of fp16's losses, every rank's random state, and what every rank noted of its epochs.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from nfold.frameworks.base import Task
from nfold.frameworks.checkpoints import CheckpointMetadata, newest_checkpoint, write_metadata
from nfold.frameworks.torch import checkpoint as files
from nfold.frameworks.torch.parallel import barrier
from nfold.measurement import RankSamples, cell_id
from nfold.plain import deserialize, serialize


@dataclass(frozen=True)
class TrainingState:
    """The parts of a trainer that change while it trains."""

    module: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler


class Checkpointer:
    """Keeps nothing and goes on from nothing: training that is only measured."""

    def __init__(self, task: Task) -> None:
        self.task = task

    def resume(self) -> RankSamples:
        """Put back what was kept; returns what this rank had noted of the epochs until then."""
        return RankSamples(rank=self.task.rank, device="")

    def save(self, samples: RankSamples, step: int) -> None:
        """Keep the state after the last epoch of ``samples``, after ``step``; all ranks call it."""


class FolderCheckpointer(Checkpointer):
    """Keeps a training in a folder that all its ranks see."""

    def __init__(self, task: Task, folder: Path, state: TrainingState) -> None:
        super().__init__(task)
        self._folder = folder
        self._state = state

    def resume(self) -> RankSamples:
        """Go on from the newest checkpoint; DataCorrupt where it cannot be read."""
        found = newest_checkpoint(self._folder)
        if found is None:
            return super().resume()
        state = self._state
        state.module.load_state_dict(files.read_part(found, "model"))
        state.optimizer.load_state_dict(files.read_part(found, "optimizer"))
        _match_parameter_strides(state.optimizer)
        state.scaler.load_state_dict(files.read_part(found, "scaler"))
        own = files.read_part(found, f"rank-{self.task.rank}")
        files.set_random_state(own["random"])
        return deserialize(RankSamples, own["samples"])

    def save(self, samples: RankSamples, step: int) -> None:
        """Write a checkpoint where the epoch's number asks for it, and after the last one."""
        epoch = len(samples.epochs)
        if epoch % self.task.checkpoint_every == 0 or epoch == self.task.plan.epochs:
            self._write(samples, f"step-{step}")

    def _write(self, samples: RankSamples, name: str) -> None:
        aside, main = self._folder / f".{name}.new", self.task.rank == 0
        if main:
            files.begin_checkpoint(aside)
        barrier(self.task.world_size)
        own = {"random": files.get_random_state(), "samples": serialize(_without_times(samples))}
        files.write_part(aside, f"rank-{self.task.rank}", own)
        if main:
            self._write_shared(aside, samples)
        barrier(self.task.world_size)
        if main:
            files.commit_checkpoint(aside, self._folder / name, keep=1)
        barrier(self.task.world_size)

    def _write_shared(self, aside: Path, samples: RankSamples) -> None:
        task, state = self.task, self._state
        files.write_part(aside, "model", state.module.state_dict())
        files.write_part(aside, "optimizer", state.optimizer.state_dict())
        files.write_part(aside, "scaler", state.scaler.state_dict())
        trained = CheckpointMetadata(
            cell=cell_id(
                task.workload.for_checkpoints, task.plan, task.requested_variant, task.machine
            ),
            workload=str(task.workload),
            plan=task.plan.to_dict(),
            epochs=samples.epochs,
        )
        write_metadata(aside, trained)


def build_checkpointer(task: Task, state: TrainingState) -> Checkpointer:
    """What keeps the task's training."""
    if task.checkpoint is None:
        return Checkpointer(task)
    return FolderCheckpointer(task, Path(task.checkpoint), state)


def _without_times(samples: RankSamples) -> RankSamples:
    """Windows and steps belong to the process that timed them, and to its telemetry."""
    return dataclasses.replace(samples, first_step_ms=None, windows=(), step_ms=())


def _match_parameter_strides(optimizer: torch.optim.Optimizer) -> None:
    """Give the optimizer's tensors their parameters' strides: kernels over lists want them alike.

    A file holds them contiguous, whatever the layout of the plan.
    """
    for parameter, kept in optimizer.state.items():
        for name, value in kept.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                kept[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
