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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from nfold.core.errors import DataCorrupt, UsageError
from nfold.core.measurement import RankSamples, cell_id
from nfold.core.serialization import deserialize, serialize
from nfold.engines.base import Task
from nfold.engines.checkpoint_folder import (
    METADATA_FILE,
    PROGRESS_PART,
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
from nfold.engines.torch.communication.sharded_optimizer import ShardedOptimizer
from nfold.engines.torch.step.cuda_graph import make_capturable

FORMAT = 2  # nfold 0.1 wrote format 1 in nfold.Run, and one without progress in ``nfold train``
SCALER_PART = "scaler"
SHARDS = "optimizer_shards"  # of a rank, and the names of the optimizers that have them
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


class Stateful(Protocol):
    """An object whose state is a part of a checkpoint."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


@dataclass
class TrainingState:
    """The objects that change during training, in order, and the optimizer steps so far.

    ``sharded``: the optimizers whose state is divided over the ranks, which save and load it.
    ``capture_device``: the optimizers step inside CUDA graphs on it. The loss scale is optional in
    a checkpoint: another precision can resume from it.
    """

    models: list[nn.Module] = field(default_factory=list)
    optimizers: list[Optimizer] = field(default_factory=list)
    schedulers: list[LRScheduler] = field(default_factory=list)
    loaders: list[Stateful] = field(default_factory=list)
    scaler: Stateful | None = None
    capture_device: torch.device | None = None
    sharded: dict[Optimizer, ShardedOptimizer] = field(default_factory=dict)
    steps: int = 0

    def parts(self) -> dict[str, Stateful]:
        kinds: dict[str, Sequence[Stateful]] = {
            "model": self.models,
            "optimizer": [self.sharded.get(one, one) for one in self.optimizers],
            "scheduler": self.schedulers,
            "loader": self.loaders,
        }
        return {
            f"{kind}-{number}": part
            for kind, parts in kinds.items()
            for number, part in enumerate(parts)
        }


def save_checkpoint(
    state: TrainingState,
    folder: Path,
    *,
    rank: int,
    world_size: int,
    keep: int,
    extra: Mapping[str, Any] | None = None,
    own: Mapping[str, Any] | None = None,
    metadata: CheckpointMetadata | None = None,
) -> Path:
    """Write ``state`` into ``folder``, which all ranks can read; all ranks must call it.

    Rank 0 writes the parts of the state and ``extra`` values; every rank its random state, its
    ``own`` values and its part of sharded optimizer states, so that training resumes exactly.
    """
    parts = state.parts()
    sharded = {name: part for name, part in parts.items() if isinstance(part, ShardedOptimizer)}
    final = folder / f"step-{state.steps}"
    staging = folder / f".{final.name}.new"
    if rank == 0:
        begin_checkpoint(staging)
    barrier(world_size)
    values = {"random": get_random_state(), **(own or {})}
    if rank and sharded:
        values[SHARDS] = {name: part.state_dict()["state"] for name, part in sharded.items()}
    write_part(staging, f"rank-{rank}", values)
    if rank == 0:
        parts |= {} if state.scaler is None else {SCALER_PART: state.scaler}
        for name, part in parts.items():
            write_part(staging, name, part.state_dict())
        numbers = {"format": FORMAT, "steps": state.steps, "ranks": world_size}
        names = {SHARDS: list(sharded), "parts": list(parts)}
        write_part(staging, PROGRESS_PART, {**numbers, **names, "extra": extra or {}})
        if metadata is not None:
            write_metadata(staging, metadata)
    barrier(world_size)
    if rank == 0:
        commit_checkpoint(staging, final, keep)
    barrier(world_size)
    return final


def find_checkpoint(folder: Path, rank: int) -> Path | None:
    """Return the newest readable checkpoint; rank 0 warns its caller's caller of damaged ones."""
    newest = newest_checkpoint(folder)
    if newest and rank == 0 and (skipped := skipped_checkpoints_warning(folder)):
        warnings.warn(skipped, stacklevel=3)
    return newest


def load_checkpoint(
    state: TrainingState, checkpoint: Path, *, rank: int, world_size: int
) -> SavedCheckpoint:
    """Restore ``state``; return the checkpoint, which has further values.

    Raises UsageError if it holds other parts. With another number of ranks, samples and their order
    stay the same, but dropout draws differ.
    """
    saved, parts = open_checkpoint(checkpoint), state.parts()
    if (held := [name for name in saved.progress["parts"] if name != SCALER_PART]) != list(parts):
        raise UsageError(
            f"{checkpoint} holds {', '.join(held)}, this training has {', '.join(parts)}; "
            "next: run.resume() after all run.prepare() and run.loader()"
        )
    for name, part in parts.items():
        part.load_state_dict(saved.read(name))
    for optimizer in state.optimizers:
        _match_parameter_strides(optimizer)
        if state.capture_device is not None:
            make_capturable(optimizer, state.capture_device)
    if state.scaler is not None and SCALER_PART in saved.progress["parts"]:
        state.scaler.load_state_dict(saved.read(SCALER_PART))
    if saved.progress["ranks"] == world_size:
        set_random_state(saved.read(f"rank-{rank}")["random"])
    state.steps = saved.progress["steps"]
    return saved


def _match_parameter_strides(optimizer: Optimizer) -> None:
    """Fused kernels need equal strides; files hold contiguous tensors."""
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                alike = torch.empty_like(parameter, dtype=value.dtype, device=value.device)
                state[name] = alike.copy_(value)


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint: its ``progress``, and ``values`` of parts that nfold 0.1 kept in other files."""

    folder: Path
    progress: Mapping[str, Any]
    values: Mapping[str, Any] = field(default_factory=dict)

    def read(self, part: str) -> Any:
        value = self.values[part] if part in self.values else read_part(self.folder, part)
        if part in self.progress.get(SHARDS, ()):
            for rank in range(1, self.progress["ranks"]):
                value["state"] |= read_part(self.folder, f"rank-{rank}")[SHARDS][part]
        return value


def open_checkpoint(folder: Path) -> SavedCheckpoint:
    """Return a checkpoint of any format. Raises DataCorrupt if it cannot be read."""
    if (folder / METADATA_FILE).exists() and not (folder / f"{PROGRESS_PART}.json").exists():
        values = {f"{kind}-0": read_part(folder, kind) for kind in ("model", "optimizer")}
        ranks = len(list(folder.glob("rank-*.json")))
        progress = {"ranks": ranks, "parts": [*values, SCALER_PART], "steps": 0, "extra": {}}
        return SavedCheckpoint(folder, progress, values)
    progress = read_part(folder, PROGRESS_PART)
    if progress["format"] == FORMAT:
        return SavedCheckpoint(folder, progress)
    values = {
        f"loader-{number}": {"epoch": epoch, "step": step}
        for number, (epoch, step) in enumerate(progress["loaders"])
    }
    if progress["scale"] is not None:
        values[SCALER_PART] = progress["scale"]
    progress["parts"] += values
    for rank in range(progress["ranks"]):
        values[f"rank-{rank}"] = {"random": read_part(folder, f"random-{rank}")}
    return SavedCheckpoint(folder, progress, values)


class Checkpointer:
    """Saves a built-in training to the task's folder; to none for measurements."""

    def __init__(self, task: Task, state: TrainingState) -> None:
        self.task = task
        self._folder = None if task.checkpoint is None else Path(task.checkpoint)
        self._state = state

    def resume(self) -> RankSamples:
        """Restore the newest readable checkpoint; return this rank's samples up to it."""
        rank, world_size = self.task.rank, self.task.world_size
        checkpoint = None if self._folder is None else find_checkpoint(self._folder, rank)
        if checkpoint is None:
            return RankSamples(rank=rank, device="")
        saved = load_checkpoint(self._state, checkpoint, rank=rank, world_size=world_size)
        return deserialize(RankSamples, saved.read(f"rank-{rank}")["samples"])

    def save(self, samples: RankSamples, step: int) -> None:
        """Save the state after the last epoch of ``samples``, after ``step``; all ranks call it."""
        epoch, task = len(samples.epochs), self.task
        due = epoch % task.checkpoint_every == 0 or epoch == task.plan.epochs
        if self._folder is None or not due:
            return
        self._state.steps = step
        untimed = dataclasses.replace(samples, first_step_ms=None, windows=(), step_ms=())
        save_checkpoint(
            self._state,
            self._folder,
            rank=task.rank,
            world_size=task.world_size,
            keep=KEPT_CHECKPOINTS,
            own={"samples": serialize(untimed)},
            metadata=CheckpointMetadata(
                cell=cell_id(
                    task.workload.for_checkpoints, task.plan, task.requested_variant, task.machine
                ),
                workload=str(task.workload),
                plan=task.plan.to_dict(),
                epochs=samples.epochs,
            ),
        )
