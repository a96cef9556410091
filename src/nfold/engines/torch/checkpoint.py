"""Checkpoints: the whole state of a training, written under a temporary name and renamed.

A checkpoint is a folder ``step-N``: tensors as safetensors, other values as JSON, no pickle. It is
flushed to the disk and then renamed, so that a folder with this name is complete. Superseded
checkpoints are removed afterwards.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from nfold.core.errors import DataCorrupt, UsageError
from nfold.core.measurement import RankSamples, cell_id
from nfold.core.serialization import deserialize, serialize
from nfold.engines.base import Task
from nfold.engines.checkpoint_folder import (
    REPLACED_SUFFIX,
    CheckpointMetadata,
    newest_checkpoint,
    skipped_checkpoints_warning,
    superseded_checkpoints,
    verify_checksum,
    write_checksums,
    write_metadata,
)
from nfold.engines.torch.communication.data_parallel import barrier

FORMAT = 1
KEPT_CHECKPOINTS = 2  # the older one is used if the newest is damaged
SEPARATOR = "/"


def begin_checkpoint(staging: Path) -> None:
    """Make an empty folder to write a checkpoint to; remove that of a killed run."""
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)


def write_part(staging: Path, name: str, values: Mapping[str, Any]) -> None:
    """Write nested ``values``: tensors to NAME.safetensors, others to NAME.json."""
    tensors: dict[str, Tensor] = {}
    others = _without_tensors(values, "", tensors)
    on_cpu = {key: tensor.detach().cpu().contiguous().clone() for key, tensor in tensors.items()}
    save_file(on_cpu, staging / f"{name}.safetensors")
    try:
        text = json.dumps(others)
    except TypeError as error:
        raise UsageError(
            f"the state of {name} cannot be saved in a checkpoint ({error}); allowed are tensors, "
            "numbers, texts, lists and dictionaries"
        ) from None
    (staging / f"{name}.json").write_text(text)


def read_part(folder: Path, name: str) -> Any:
    """Return the values of ``write_part``, tensors on the CPU. Raises DataCorrupt with the file."""
    try:
        verify_checksum(folder / f"{name}.safetensors")
        verify_checksum(folder / f"{name}.json")
        tensors = load_file(folder / f"{name}.safetensors")
        others = json.loads((folder / f"{name}.json").read_text())
    except Exception as error:
        raise DataCorrupt(f"{folder / name}: the checkpoint cannot be read ({error})") from None
    return _with_tensors(others, tensors)


def _without_tensors(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        while path in tensors:  # a key contains the separator, or is a number
            path += SEPARATOR
        tensors[path] = value
        return {"tensor": path}
    if isinstance(value, Mapping):
        keys = [
            [_check_key(key), _without_tensors(value[key], f"{path}{SEPARATOR}{key}", tensors)]
            for key in value
        ]
        return {"mapping": keys}
    if isinstance(value, list | tuple):
        return [
            _without_tensors(item, f"{path}{SEPARATOR}{number}", tensors)
            for number, item in enumerate(value)
        ]
    return value


def _check_key(key: Any) -> Any:
    if not isinstance(key, str | int):
        raise UsageError(f"key {key!r} of a state: allowed are texts and whole numbers")
    return key


def _with_tensors(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, dict):
        if "tensor" in value:
            return tensors[value["tensor"]]
        return {key: _with_tensors(item, tensors) for key, item in value["mapping"]}
    if isinstance(value, list):
        return [_with_tensors(item, tensors) for item in value]
    return value


def commit_checkpoint(staging: Path, final: Path, keep: int) -> None:
    """Flush ``staging`` to the disk, rename it to ``final``, remove all but the ``keep`` newest."""
    write_checksums(staging)
    for file in staging.iterdir():
        _fsync(file)
    _fsync(staging)
    before = final.with_name(f"{final.name}{REPLACED_SUFFIX}")
    if final.exists():
        final.rename(before)
    staging.rename(final)
    _fsync(final.parent)
    shutil.rmtree(before, ignore_errors=True)
    for path in superseded_checkpoints(final, keep):
        shutil.rmtree(path)


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def get_random_state() -> dict[str, Any]:
    state: dict[str, Any] = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


@dataclass(frozen=True)
class TrainingState:
    """The parts of a trainer that change during training."""

    module: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler


class Checkpointer:
    """Saves a training to the task's folder, which all ranks can read; to none for measurements.

    Rank 0 saves parameters, buffers, optimizer and loss scale; every rank its random state and its
    samples, so that training resumes exactly.
    """

    def __init__(self, task: Task, state: TrainingState) -> None:
        self.task = task
        self._folder = None if task.checkpoint is None else Path(task.checkpoint)
        self._state = state

    def resume(self) -> RankSamples:
        """Restore the newest readable checkpoint; return this rank's samples up to it."""
        checkpoint = None if self._folder is None else newest_checkpoint(self._folder)
        if self._folder is None or checkpoint is None:
            return RankSamples(rank=self.task.rank, device="")
        if self.task.rank == 0 and (skipped := skipped_checkpoints_warning(self._folder)):
            warnings.warn(skipped, stacklevel=2)
        state = self._state
        state.module.load_state_dict(read_part(checkpoint, "model"))
        state.optimizer.load_state_dict(read_part(checkpoint, "optimizer"))
        _match_parameter_strides(state.optimizer)
        state.scaler.load_state_dict(read_part(checkpoint, "scaler"))
        own = read_part(checkpoint, f"rank-{self.task.rank}")
        set_random_state(own["random"])
        return deserialize(RankSamples, own["samples"])

    def save(self, samples: RankSamples, step: int) -> None:
        """Save the state after the last epoch of ``samples``, after ``step``; all ranks call it."""
        epoch, task = len(samples.epochs), self.task
        due = epoch % task.checkpoint_every == 0 or epoch == task.plan.epochs
        if self._folder is not None and due:
            self._write(samples, self._folder / f"step-{step}")

    def _write(self, samples: RankSamples, final: Path) -> None:
        staging, main = final.with_name(f".{final.name}.new"), self.task.rank == 0
        if main:
            begin_checkpoint(staging)
        barrier(self.task.world_size)
        untimed = dataclasses.replace(samples, first_step_ms=None, windows=(), step_ms=())
        own = {"random": get_random_state(), "samples": serialize(untimed)}
        write_part(staging, f"rank-{self.task.rank}", own)
        if main:
            self._write_shared(staging, samples)
        barrier(self.task.world_size)
        if main:
            commit_checkpoint(staging, final, KEPT_CHECKPOINTS)
        barrier(self.task.world_size)

    def _write_shared(self, staging: Path, samples: RankSamples) -> None:
        task, state = self.task, self._state
        write_part(staging, "model", state.module.state_dict())
        write_part(staging, "optimizer", state.optimizer.state_dict())
        write_part(staging, "scaler", state.scaler.state_dict())
        metadata = CheckpointMetadata(
            cell=cell_id(
                task.workload.for_checkpoints, task.plan, task.requested_variant, task.machine
            ),
            workload=str(task.workload),
            plan=task.plan.to_dict(),
            epochs=samples.epochs,
        )
        write_metadata(staging, metadata)


def _match_parameter_strides(optimizer: torch.optim.Optimizer) -> None:
    """Fused kernels need equal strides; files hold contiguous tensors."""
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                state[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
