"""One rank of a script, watched from outside: its steps, what feeds them, and their end."""

from __future__ import annotations

import dataclasses
import multiprocessing
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim.optimizer import register_optimizer_step_post_hook

from nfold.errors import Unsupported
from nfold.frameworks.base import Observer, Phase, Task
from nfold.frameworks.recording import Length, Recorder
from nfold.frameworks.torch.devices import Devices
from nfold.frameworks.torch.script.boundary import Boundary
from nfold.frameworks.torch.script.clock import LateClock
from nfold.frameworks.torch.script.overrides import Overrides
from nfold.frameworks.torch.script.patches import Patches
from nfold.frameworks.torch.script.replay import Replay
from nfold.frameworks.torch.script.streams import Feed, Taken
from nfold.frameworks.torch.script.wrappers import Wrappers
from nfold.measurement import RankSamples


class Watch:
    """Counts the steps of one rank's script, times them, and ends the process after the last."""

    def __init__(self, task: Task, observer: Observer) -> None:
        self._task = task
        self._observer = observer
        self._patches, self._warm_up = Patches(), Patches()
        self._boundary = Boundary()
        self._clock = LateClock()
        warmup = task.plan.warmup_steps or 0
        length = Length.of(warmup + (task.plan.steps or 0), warmup)
        self._settles_at = max(1, length.warmup - 1)
        self.warmup_steps = length.warmup
        self._recorder = Recorder(task.rank, "", self._clock, observer, length, _no_losses)
        left_out = task.left_out
        self._feed = Feed(
            prepare=Overrides(task),
            replay=None if left_out.input == "real" else self._replay,
            began=self._begin,
            aside=self._aside,
        )
        self._wrappers = Wrappers(left_out, lambda: None)
        self._in_step = False
        self.devices = Devices((torch.device("cpu"),))
        self.skipped_steps = 0
        self.left = False

    @property
    def steps(self) -> int:
        """Steps so far, those of the warm-up too."""
        return self._recorder.steps

    @property
    def timed_steps(self) -> int:
        """Steps after the warm-up."""
        return self.steps - self.warmup_steps

    @property
    def children(self) -> int:
        """Processes that the script has started and that still run."""
        return len(multiprocessing.active_children())

    def install(self) -> None:
        """Put everything in its place; the script has just imported torch."""
        self._feed.install(self._patches, self._warm_up)
        self._wrappers.install(self._patches)
        self._patches.put(GradScaler, "step", self._scaled)
        register_optimizer_step_post_hook(lambda optimizer, *_: self.stepped(optimizer))
        self._begin()

    def stepped(self, optimizer: Any) -> None:
        """An optimizer has stepped, or would have, had its gradients been finite."""
        self._in_step = True
        if not self._boundary.ends(optimizer):
            return
        taken = self._feed.taken()
        if not self.steps:
            self._know_devices(optimizer)
        self._recorder.step(_Fed(taken), None)
        if self.steps == self._settles_at:
            self._settle()
        if self._recorder.done:
            self._leave()

    def samples(self) -> RankSamples:
        """Everything measured so far."""
        self._recorder.end()
        replays = self._feed.replays
        left_out = self._task.left_out
        if left_out.input != "real" and not replays:
            raise Unsupported(
                f"input {left_out.input}: no DataLoader fed {self._task.workload.name}'s steps, so "
                "there are no batches to give again"
            )
        found = self._recorder.samples(
            peak_memory_bytes=self.devices.peak_memory_bytes(),
            reserved_memory_bytes=self.devices.reserved_memory_bytes(),
            data_bytes=sum(replay.data_bytes for replay in replays),
        )
        return dataclasses.replace(found, rank=self._task.rank)

    def _scaled(self, usual: Any) -> Any:
        """GradScaler's step: one that was skipped is a step too, or ranks would part."""

        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            self._in_step = False
            returned = usual(scaler, optimizer, *args, **kwargs)
            if not self._in_step:
                self.skipped_steps += 1
                self.stepped(optimizer)
            return returned

        return step

    def _begin(self) -> None:
        """The first step is timed from the last pass that began before it."""
        if not self.steps:
            self._recorder.begin()

    def _aside(self) -> None:
        """The script lives, though it makes no steps now."""
        self._observer.beat(Phase.EVALUATING, self.steps)

    def _know_devices(self, optimizer: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        found = [device_of(wrapped) for wrapped in self._wrappers.dp]
        several = next((devices for devices in found if devices), ())
        self.devices = Devices(several or (_device(parameters),))
        self._clock.know(self.devices)
        self._recorder.device = self.devices.describe()

    def _replay(self) -> Replay:
        resident = self._task.left_out.input == "resident"
        return Replay(self.devices.primary if resident else None)

    def _settle(self) -> None:
        """The warm-up's last step comes: all is known, and ranks that are apart meet."""
        self._boundary.settle()
        self._feed.warming = False
        self._warm_up.undo()
        self._observer.await_others(self.steps)

    def _leave(self) -> None:
        self.left = True
        self._observer.leave(self.samples())


@dataclasses.dataclass(frozen=True)
class _Fed:
    """A step's samples, as the recorder notes them."""

    taken: Taken

    @property
    def count(self) -> int:
        return self.taken.samples

    @property
    def sample_hash(self) -> int:
        return self.taken.sample_hash


def device_of(wrapped: Any) -> tuple[torch.device, ...]:
    """The devices of an nn.DataParallel, () on CPU devices."""
    indices = getattr(wrapped, "device_ids", None) or ()
    return tuple(torch.device("cuda", index) for index in indices)


def _device(parameters: Iterable[Tensor]) -> torch.device:
    return next((parameter.device for parameter in parameters), torch.device("cpu"))


def _no_losses(_kept: Sequence[None]) -> Sequence[float]:
    """A script's losses are its own."""
    return ()
