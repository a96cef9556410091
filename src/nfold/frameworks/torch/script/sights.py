"""All that looks at a script's warm-up or changes its parts, behind one seam; then the facts."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from nfold.errors import Unsupported
from nfold.frameworks.base import Task
from nfold.frameworks.left_out import LeftOut
from nfold.frameworks.torch.devices import Devices
from nfold.frameworks.torch.script import facts, order, tensors
from nfold.frameworks.torch.script.anomalies import Anomalies
from nfold.frameworks.torch.script.boundary import Boundary
from nfold.frameworks.torch.script.collectives import Collectives
from nfold.frameworks.torch.script.compiling import Compiling
from nfold.frameworks.torch.script.environment import slices
from nfold.frameworks.torch.script.fetching import NONE, Fetching, Total, fetched
from nfold.frameworks.torch.script.forward import Forward
from nfold.frameworks.torch.script.given import Taken
from nfold.frameworks.torch.script.making import Making
from nfold.frameworks.torch.script.patches import Patches
from nfold.frameworks.torch.script.stepping import Stepping
from nfold.frameworks.torch.script.streams import Feed
from nfold.frameworks.torch.script.tally import Tally
from nfold.frameworks.torch.script.threads import Threads
from nfold.frameworks.torch.script.trainers import Trainers
from nfold.frameworks.torch.script.unwaited import Unwaited
from nfold.frameworks.torch.script.wrappers import Wrappers
from nfold.seen import SPLIT, Parallel, Seen


class Sights:
    """What is seen of one rank: ``install``, ``begin`` after its first step, ``settle``."""

    def __init__(
        self,
        task: Task,
        left_out: LeftOut,
        feed: Feed,
        boundary: Boundary,
        stepping: Stepping,
        trainers: Trainers,
    ) -> None:
        self._task = task
        self._left_out = left_out
        self._feed = feed
        self._boundary = boundary
        self._stepping = stepping
        self._trainers = trainers
        self._tally = Tally()
        self.making = Making(left_out, feed.new_replay, feed.asked)
        self._forward = Forward(self.making.fed, stepping.computing)
        self._wrappers = Wrappers(left_out, lambda: self._tally.place("wrapper"))
        self.collectives = Collectives(left_out, self._tally)
        self._anomalies = Anomalies(left_out, self._tally)
        self._threads = Threads(left_out, self._tally)
        self._unwaited, self._reads = Unwaited(left_out, lambda: feed.again), Patches()
        self._compiling = Compiling(left_out.now.compiled)
        self.fetching = Fetching()
        self._warm = NONE
        self._retries = 0
        self._batches: list[int] = []
        self._counts: list[int] = []
        self._through: list[int] = []
        self._parts = task.world_size if slices(task) else 1
        self._wait_s = 0.0
        self._seen = Seen(rank=task.rank)
        self.uneven = False
        self.children = 0

    def install(self, patches: Patches, warm_up: Patches) -> None:
        """Put everything in its place."""
        self._wrappers.install(patches, warm_up)
        if self._left_out.now.channels_last:
            order.install(patches)
        self.collectives.install(patches, warm_up)
        self._anomalies.install(patches, warm_up)
        self.fetching.install(patches, in_worker=lambda: self.remove(warm_up))
        for name in ("to", "cuda"):
            warm_up.put(nn.Module, name, self._moving)
        # What stays goes in before what the end of the warm-up takes out again.
        if not self._left_out.never("host_syncs"):
            self._unwaited.install(self._reads)
        tensors.install(warm_up, self._tally, self._feed.moves.moved)
        self._threads.install(patches, warm_up)
        patches.put(BaseProcess, "start", self._starting)
        self._forward.start()
        self._compiling.start()

    def turn(self) -> None:
        """What is left out has changed."""
        self._wrappers.turn()
        self._anomalies.turn()
        self._threads.turn(self._seen.threads)

    def _starting(self, usual: Any) -> Any:
        """A process of the script's own is counted, a loader's worker is not."""

        @functools.wraps(usual)
        def start(process: Any) -> None:
            module = getattr(getattr(process, "_target", None), "__module__", "")
            self.children += not str(module).startswith("torch.utils.data")
            usual(process)

        return start

    def _moving(self, usual: Any) -> Any:
        """A module on its way to a device: noted with its line."""

        @functools.wraps(usual)
        def move(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            self._tally.place("model")
            return usual(module, *args, **kwargs)

        return move

    @property
    def parameters(self) -> Sequence[Tensor]:
        """What the optimizers train, in the order of their first steps."""
        return self._boundary.parameters

    @property
    def parameter_count(self) -> int:
        """Numbers that are trained on this rank."""
        return sum(parameter.numel() for parameter in self.parameters)

    def devices(self) -> Devices:
        """Those that the parameters are used on."""
        several = [wrapped.device_ids or () for wrapped in self._wrappers.dp]
        indices = next((ids for ids in several if len(ids)), ())
        if indices:
            return Devices(tuple(torch.device("cuda", index) for index in indices))
        first = next((parameter.device for parameter in self.parameters), torch.device("cpu"))
        return Devices((first,))

    @property
    def may_compile(self) -> bool:
        """Whether the second step may take a compiler's time: a batch of another shape does."""
        return bool(self._left_out.now.compiled) or facts.compiles()

    def begin(self) -> None:
        """The first step is made."""
        if self._kind() in SPLIT and not self._left_out.never("exchange"):
            raise Unsupported(
                "exchange: the parameters are sharded (FSDP), without an exchange no rank has "
                "them; allowed are real and replayed input, and one device alone"
            )
        self._tally.on = True
        self.collectives.begin()
        if self._feed.loader is None:
            self.making.begin()

    def _kind(self) -> Parallel:
        """How the script uses several devices, as far as that is known."""
        called = self._forward.outermost
        return facts.parallel_kind(self._wrappers, self.parameters, self._tally, called)

    @property
    def alike(self) -> Sequence[Tensor]:
        """The parameters that all ranks must have."""
        return facts.alike(self._kind(), self._wrappers, self.parameters, self._tally)

    def stepped(self, taken: Taken) -> int:
        """Note a step: what it was fed, and in the warm-up, its line. Returns its samples.

        Where nobody could see any, a step counts as one, so that there is a rate.
        """
        self._wait_s += taken.wait_s
        self._wrappers.stepped()
        self.collectives.stepped(lambda: self.parameters)
        fed = taken.batches or self._feed.loader is not None
        if not self._feed.warming:
            counted = taken.samples if fed else self._usual
            return counted // self._parts if any(self._counts) else 1
        self._through.append(self._forward.taken())
        self._batches.append(taken.batches)
        self._counts.append(taken.samples if fed else self._through[-1])
        self.making.stepped()
        if self._tally.on:
            self._tally.place("step")
        return self._counts[-1]

    @property
    def _usual(self) -> int:
        """Samples of a step of the warm-up."""
        return round(median(self._counts)) if self._counts else 0

    def settle(self, steps: int, devices: Devices) -> None:
        """The warm-up is over but for one step: nothing looks any more, the facts are known."""
        counted = steps - 1
        if self.uneven and self._feed.loader is None:
            raise Unsupported(
                "Join: ranks may make unequal numbers of steps, and only the passes of a "
                "DataLoader can be kept from ending; next: give each rank its batches through one"
            )
        self.stop()
        self._forward.follow()
        self._unwaited.begin()
        self._wait_s = 0.0
        self._seen = self._facts(counted)
        self.making.replace()
        self._compiling.check(compiled=self._seen.compiled)
        self._warm = self.fetched
        self._retries = devices.allocator_retries()

    def remove(self, warm_up: Patches) -> None:
        """Look at nothing any more and let everything be read: here at the end, in a worker at
        once. What was put in place last is undone first.
        """
        self.stop()
        warm_up.undo()
        self._reads.undo()

    def stop(self) -> None:
        """Look at nothing any more."""
        self._tally.on = False
        self.making.stop()
        self._forward.stop()
        self._compiling.stop()

    def finished(self, timed_steps: int, devices: Devices) -> Seen:
        """The facts, with what only the timed steps tell."""
        retries = devices.allocator_retries() - self._retries
        first = self._feed.first_waits_s
        later = first[1:] or first
        return dataclasses.replace(
            self._seen,
            steps=timed_steps,
            input_wait_ms=1e3 * self._wait_s / max(1, timed_steps),
            epoch_wait_ms=1e3 * median(later) if later else 0.0,
            fetches=fetched(self._warm, self.fetched),
            skipped_steps=self._stepping.skipped_steps,
            peak_memory_bytes=devices.peak_memory_bytes(),
            alloc_retries=retries / max(1, timed_steps),
            epochs_ended=self._feed.epochs_ended,
            children=self.children,
        )

    @property
    def fetched(self) -> Total:
        """What its data sets gave so far."""
        return self.fetching.total(self._feed.loader, self._feed.beside)

    def _facts(self, steps: int) -> Seen:
        wrappers, forward = self._wrappers, self._forward
        device = next((str(p.device) for p in self.parameters), "cpu")
        self._tally.at("trainer", self._trainers.place)
        found = {
            **facts.group_facts(device.partition(":")[0]),
            **facts.wrapper_facts(wrappers),
            **facts.model_facts(forward.model, self.parameters),
            **facts.step_facts(self._tally, steps),
        }
        feed, own, stay = self._feed, self._feed.loader, self._feed.moves.stay
        loader = None if own is None else facts.loader_facts(own, feed.place_of(own), stay)
        batches = round(median(self._batches)) if self._batches else 0
        accumulation = max(1, batches or self.making.per_step)
        wrappers.accumulation = accumulation
        return Seen(
            rank=self._task.rank,
            exchanges=wrappers.exchanges_a_step(len(self._counts)),
            parallel=self._kind(),
            trainer=self._trainers.used,
            device=device,
            loader=loader,
            beside=tuple(facts.loader_facts(one, feed.place_of(one)) for one in feed.beside),
            maker=self.making.found if loader is None else None,
            samples_per_step=float(self._usual),
            through_model=float(median(self._through or [0])),
            accumulation=accumulation,
            optimizers=tuple(type(one).__name__ for one in self._boundary.optimizers),
            boundary=self._boundary.chosen,
            in_backward=self._stepping.in_backward,
            precision=facts.precision_of(self.parameters, forward.autocast),
            autocast=forward.autocast,
            channels_last=forward.channels_last,
            followed=forward.follows,
            compiled=facts.compiles(),
            detects_anomalies=self._anomalies.on,
            threads=torch.get_num_threads(),
            uneven=self.uneven,
            **found,
        )
