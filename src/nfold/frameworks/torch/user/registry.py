"""What one Run has prepared, and its state as a checkpoint keeps it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from nfold.errors import UsageError
from nfold.frameworks.torch import checkpoint as files
from nfold.frameworks.torch.user.job import Job
from nfold.frameworks.torch.user.loader import LoaderPosition, RunLoader
from nfold.frameworks.torch.user.scale import LossScale

PREPARE_ADVICE = "next: model, optimizer = run.prepare(model, optimizer)"


@dataclass
class PreparedObjects:
    """Everything that training goes on from, in the order in which it was prepared."""

    models: list[nn.Module] = field(default_factory=list)
    optimizers: list[Optimizer] = field(default_factory=list)
    schedulers: list[LRScheduler] = field(default_factory=list)
    loaders: list[RunLoader] = field(default_factory=list)
    steps: int = 0

    def missing_reason(self) -> str | None:
        """What was not prepared although training depends on it; None where everything was."""
        if not self.models:
            return "no model is prepared: nfold exchanges no gradients; " + PREPARE_ADVICE
        if not self.optimizers:
            return (
                "no optimizer is prepared: steps are not counted, checkpoints lack it; "
                + PREPARE_ADVICE
            )
        known = {parameter for model in self.models for parameter in model.parameters()}
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        strange = sum(p not in known for group in groups for p in group["params"])
        if not strange:
            return None
        return (
            f"an optimizer updates {strange} parameters of no prepared model: their gradients are "
            "not exchanged, devices drift apart; next: run.prepare() of the module that holds them"
        )

    def checkpoint_parts(self) -> dict[str, Any]:
        """Objects with ``state_dict`` and ``load_state_dict``, by the names of their files."""
        kinds: dict[str, list[Any]] = {
            "model": self.models,
            "optimizer": self.optimizers,
            "scheduler": self.schedulers,
        }
        return {
            f"{kind}-{number}": one
            for kind, several in kinds.items()
            for number, one in enumerate(several)
        }

    def progress(self, scale: LossScale | None, job: Job) -> dict[str, Any]:
        """Where training stands, apart from the parts."""
        return {
            "format": files.FORMAT,
            "steps": self.steps,
            "ranks": job.world_size,
            "parts": list(self.checkpoint_parts()),
            "loaders": [[at.position.epoch, at.position.step] for at in self.loaders],
            "scale": None if scale is None else scale.state(),
        }


def save_checkpoint(
    prepared: PreparedObjects,
    folder: Path,
    job: Job,
    *,
    scale: LossScale | None,
    extra: dict[str, Any],
    keep: int,
    wait: Callable[[], None],
) -> Path:
    """Write a checkpoint of all ranks into ``folder``; every rank must call it."""
    final = folder / f"step-{prepared.steps}"
    aside = folder / f".{final.name}.new"
    if job.is_main:
        files.begin_checkpoint(aside)
    wait()
    files.write_part(aside, f"random-{job.rank}", files.get_random_state())
    if job.is_main:
        for name, part in prepared.checkpoint_parts().items():
            files.write_part(aside, name, part.state_dict())
        files.write_part(aside, "progress", {**prepared.progress(scale, job), "extra": extra})
    wait()
    if job.is_main:
        files.commit_checkpoint(aside, final, keep)
    wait()
    return final


def load_checkpoint(
    prepared: PreparedObjects, found: Path, job: Job, scale: LossScale | None
) -> dict[str, Any]:
    """Go on from the checkpoint ``found``; returns the user's own values in it.

    Raises UsageError where it holds other parts than were prepared. With another number of
    ranks, samples and their order stay the same, but dropout draws differ.
    """
    progress = files.read_part(found, "progress")
    if progress["parts"] != list(prepared.checkpoint_parts()):
        raise UsageError(
            f"{found} holds {', '.join(progress['parts'])}, prepared are "
            f"{', '.join(prepared.checkpoint_parts())}; next: run.resume() after all run.prepare()"
        )
    if len(progress["loaders"]) != len(prepared.loaders):
        raise UsageError(
            f"{found} knows {len(progress['loaders'])} loaders, made are "
            f"{len(prepared.loaders)}; next: run.resume() after all run.loader()"
        )
    for name, part in prepared.checkpoint_parts().items():
        part.load_state_dict(files.read_part(found, name))
    for loader, (epoch, step) in zip(prepared.loaders, progress["loaders"], strict=True):
        loader.seek(LoaderPosition(epoch=epoch, step=step))
    if scale is not None and progress["scale"] is not None:
        scale.load(progress["scale"])
    if progress["ranks"] == job.world_size:
        files.set_random_state(files.read_part(found, f"random-{job.rank}"))
    prepared.steps = progress["steps"]
    extra: dict[str, Any] = progress["extra"]
    return extra
