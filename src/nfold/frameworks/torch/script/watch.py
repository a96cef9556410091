"""One rank of a script, watched from outside: its steps, what feeds them, and their end."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.algorithms.join import Join

from nfold.errors import NfoldError, Unsupported
from nfold.frameworks.base import Observer, Phase, Task
from nfold.frameworks.left_out import LeftOut
from nfold.frameworks.recording import Recorder
from nfold.frameworks.torch.devices import Devices
from nfold.frameworks.torch.script.between import BetweenSteps
from nfold.frameworks.torch.script.boundary import Boundary
from nfold.frameworks.torch.script.clock import SPAN_S, LateClock
from nfold.frameworks.torch.script.environment import crowded
from nfold.frameworks.torch.script.fetching import NONE, fetched
from nfold.frameworks.torch.script.given import Fed
from nfold.frameworks.torch.script.late import LateExchange
from nfold.frameworks.torch.script.looking import Look
from nfold.frameworks.torch.script.overrides import Overrides
from nfold.frameworks.torch.script.patches import Patches
from nfold.frameworks.torch.script.pauses import Pauses
from nfold.frameworks.torch.script.replay import Replay
from nfold.frameworks.torch.script.sights import Sights
from nfold.frameworks.torch.script.spawned import follow
from nfold.frameworks.torch.script.stepping import Stepping
from nfold.frameworks.torch.script.streams import Feed
from nfold.frameworks.torch.script.trainers import Trainers
from nfold.frameworks.torch.script.turning import Turning, length_of
from nfold.frameworks.torch.script.whereabouts import Whereabouts
from nfold.frameworks.torch.weights import checksum_of, some_of
from nfold.measurement import Fetches, RankSamples
from nfold.plan import FEWEST_STEPS
from nfold.seen import Seen


class Watch:
    """Counts the steps of one rank's script, times them, and ends the process after the last."""

    def __init__(self, task: Task, observer: Observer, trainers: Trainers) -> None:
        self._task = task
        self._observer = observer
        self._patches, self._warm_up = Patches(), Patches()
        self._boundary = Boundary()
        self._clock = LateClock()
        length = length_of(task)
        self._settles_at = max(1, length.warmup - 1)
        self.warmup_steps = length.warmup
        self._recorder: Recorder[None] = Recorder(
            task.rank,
            "",
            self._clock,
            observer,
            length,
            lambda _: (),  # A script's losses are its own.
            fetched=self._fetched,
            span_s=SPAN_S,
        )
        self._overrides = Overrides(task, lambda: self._feed.steps)
        self._left_out = LeftOut(task)
        self._late = LateExchange(task, self._left_out)
        self._whereabouts = Whereabouts(lambda: not task.left_out.traced and self.timed_steps > 0)
        self._pauses = Pauses(self._whereabouts)
        self._between = self._listener()
        self._stepping = Stepping(self._late, self._pauses.computing, self.stepped)
        calm = observer.await_calm
        self._feed = Feed(self._prepare, self._replay, self._left_out, self._between, calm=calm)
        self._sights = Sights(
            task, self._left_out, self._feed, self._boundary, self._stepping, trainers
        )
        self._turning = Turning(task, self._left_out, self._recorder, observer, self._sights)
        self._look = Look(task, self._between.aside)
        self._before = NONE
        self._agreed: dict[str, Any] = {}
        self.devices = Devices((torch.device("cpu"),))
        self.left = False
        self.refused: NfoldError | None = None

    def _listener(self) -> BetweenSteps:
        return BetweenSteps(
            self._task,
            self._observer,
            self._recorder,
            self._clock,
            never_end=self._overrides.never_end,
            loader=lambda: self._feed.loader,
            full=self._leave,
            pauses=self._pauses,
        )

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
        """Processes that the script has started, apart from loaders' workers."""
        return self._sights.children

    def install(self) -> None:
        """Put everything in its place; the script has just imported torch."""
        self._feed.install(self._patches, self._warm_up)
        self._sights.install(self._patches, self._warm_up)
        self._late.install()
        follow(self._task, self._patches)
        for owner in (dist, distributed_c10d):
            self._patches.put(owner, "destroy_process_group", self._parting)
        self._patches.put(Join, "__enter__", self._joining)
        self._stepping.install(self._patches)
        self._recorder.begin()

    def remove(self) -> None:
        """Put PyTorch back as it was."""
        self._whereabouts.stop()
        self._stepping.remove()
        self._late.remove()
        self._sights.making.restore()
        self._sights.remove(self._warm_up)
        self._patches.undo()

    def stepped(self, optimizer: Any) -> None:
        """An optimizer has stepped, or what stands for one."""
        with self._kept():
            if self._boundary.ends(optimizer):
                self._count_step()

    def _count_step(self) -> None:
        taken = self._feed.taken()
        if self._look.on:
            # Under a profiler, and to read what it found, takes as long as a first step may.
            self._observer.beat(Phase.FIRST_STEP, self.steps)
            if self._look.stepped():
                self._leave()
            return
        self._pauses.stepped()
        if not self.steps:
            self._know_devices()
        self._recorder.step(Fed(self._sights.stepped(taken), taken.sample_hash), None)
        if self.steps == 1:
            self._sights.begin()
            self._whereabouts.start()
            if self._sights.may_compile:
                self._observer.beat(Phase.FIRST_STEP, self.steps)
        shorter = self._look.shortened(self.steps, self.devices)
        if shorter is not None:
            self._recorder.length = shorter
            self.warmup_steps, self._settles_at = shorter.warmup, shorter.warmup - 1
        if self.steps == self._settles_at:
            self._settle()
        if not self._recorder.done and not self._between.patience.over(self.steps):
            self._turning.stepped(self.steps)
        elif not self._look.begin(cuda=self.devices.cuda):
            self._leave()
        else:
            self._whereabouts.stop()
        self._pauses.begin()

    @contextmanager
    def _kept(self) -> Iterator[None]:
        """Keep what is refused in the script's own stack: it may catch every exception."""
        if self.refused is not None:
            raise self.refused
        try:
            yield
        except NfoldError as error:
            self.refused = error
            raise

    def _fetched(self) -> Fetches | None:
        """Batches that were made since the last window ended."""
        before, self._before = self._before, self._sights.fetched
        return fetched(before, self._before)

    def _prepare(self, loader: Any) -> None:
        with self._kept():
            self._overrides(loader)

    def samples(self) -> RankSamples:
        """Everything measured; says what was seen, too. The script makes no more steps."""
        if self.refused is not None:
            raise self.refused
        self._between.script_ended(self._feed.epochs_ended)
        replays = (*self._feed.replays, *self._sights.making.replays)
        # In turns, what had none before the script ended is run by itself.
        made = self._feed.loader is not None or self._sights.making.found is not None
        if not (self._left_out.never("input") or replays or (self._left_out.turns and made)):
            raise Unsupported(
                f"input {self._left_out.ever[-1].input}: neither a DataLoader nor a function made "
                f"the batches of {self._task.workload.name}, so none can be given again"
            )
        peak = self.devices.peak_memory_bytes()
        seen = self._sights.finished(self.timed_steps, self.devices)
        rarely = self._rarely(seen)
        self._observer.see(dataclasses.replace(seen, traced=self._look.found()))
        found = self._recorder.samples(
            pauses_ms=self._pauses.ms,
            paused_at=self._whereabouts.found,
            pass_starts=self._pauses.pass_starts,
            peak_memory_bytes=peak,
            reserved_memory_bytes=self.devices.reserved_memory_bytes(),
            data_bytes=sum(replay.data_bytes for replay in replays),
            parameter_count=self._sights.parameter_count,
            **({} if rarely else self._agreed if self._task.turns else self._trained(seen)),
            notes=(*crowded(self._task, seen.threads), *rarely),
        )
        # Only a warm-up's samples are hashed; 0 stands for those that nobody could see.
        own = () if self._task.learnt.slices else found.sample_hashes
        hashes = tuple(entry for entry in own if int(entry[1], 16))
        return dataclasses.replace(found, rank=self._task.rank, sample_hashes=hashes)

    def _rarely(self, seen: Seen) -> tuple[tuple[str, str], ...]:
        """A note of ranks that train by themselves and average what they have now and then."""
        counts = self._sights.collectives.some_only
        if counts is None or not _on_its_own(seen):
            return ()
        text = (
            "ranks exchange what they train in {} of {} steps: between them each trains by itself, "
            "and its parameters are its own"
        )
        return (("exchanged_rarely", text.format(*counts)),)

    def _trained(self, seen: Seen) -> dict[str, Any]:
        """What all ranks must have alike: no shards, nor anything where something is left out.

        Some as numbers where all gradients are exchanged: ranks may still differ by rounding.
        """
        alike = self._sights.alike if self._task.left_out.trains else ()
        some = some_of(alike) if seen.exchanges_all else ()
        return {"parameter_checksum": checksum_of(alike), "parameter_sample": some} if alike else {}

    def _parting(self, usual: Any) -> Any:
        """A script that gives up its process group has trained: tidying up may hang."""

        def destroy(group: Any = None) -> None:
            if group in (None, dist.group.WORLD) and self.timed_steps >= FEWEST_STEPS:
                self._leave()
            usual(group)

        return destroy

    def _joining(self, usual: Any) -> Any:
        """Where ranks with fewer batches wait at the end of a pass, they would part: none ends."""

        def enter(join: Any) -> Any:
            self._sights.uneven = True
            self._overrides.never_end()
            return usual(join)

        return enter

    def _know_devices(self) -> None:
        """The first step shows where the parameters are."""
        self.devices = self._sights.devices()
        self._clock.know(self.devices)
        self._recorder.device = self.devices.describe()

    def _replay(self) -> Replay:
        resident = self._left_out.now.input == "resident"
        return Replay(self.devices.primary if resident else None, self._task.learnt.stay)

    def _settle(self) -> None:
        """The warm-up's last step comes: facts are known, and ranks that are apart meet."""
        self._boundary.settle()
        self._feed.settle()
        self._sights.settle(self.steps, self.devices)
        self._warm_up.undo()
        seen = self._sights.finished(0, self.devices)
        self._observer.see(seen)
        if _on_its_own(seen):
            self._sights.collectives.go_on(self._patches)
        if self._task.turns:
            self._agreed = self._trained(seen)
        self._observer.await_others(self.steps)

    def _leave(self) -> None:
        self.left = True
        self._observer.leave(self.samples())


def _on_its_own(seen: Seen) -> bool:
    """Whether no wrapper exchanges its gradients in every step."""
    by_itself = seen.process_group and seen.parallel in ("none", "other")
    return by_itself or seen.comm_hook.startswith("post_localSGD")
