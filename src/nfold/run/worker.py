"""One rank: reads its task, runs it, leaves what it measured or why it failed.

Runs as ``python -m nfold.run.worker FOLDER`` with RANK, LOCAL_RANK and WORLD_SIZE set, as
torchrun sets them. Only Python's own library is imported before the heart beats.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from nfold.frameworks.base import Observer, Phase
from nfold.frameworks.registry import get_framework
from nfold.lifeline import die_with_parent
from nfold.measurement import RankSamples
from nfold.place import error_location
from nfold.run.calm import wait_for_idle_children
from nfold.run.handoff import HandoffFolder, HeartbeatRecord, HeartbeatWriter
from nfold.run.rank import (
    build_failure,
    exit_after_handlers,
    exit_without_cleanup,
    kill_children,
    redirect_output,
    stacks_on_signal,
)
from nfold.run.scratch import enter_sandbox
from nfold.seen import ScriptProfile

SAVE_EVERY_S = 1.0
MAX_EPOCH_SHARE = 0.01
"""The part of an epoch that writing the samples at its end may take."""
AWAIT_TIMEOUT_S = 120.0
"""How long a rank waits for others that train by themselves, and for all to be measured."""
AWAIT_POLL_S = 0.02


class FolderObserver(Observer):
    """Reports to the measurement's folder: beats always, samples at most once a second.

    What an epoch's end adds is written at once, unless epochs are so short that writing would
    take more than 1 % of them.
    """

    def __init__(self, folder: HandoffFolder, rank: int, world_size: int = 1) -> None:
        self._folder = folder
        self._others = frozenset(range(world_size)) - {rank}
        self._heart = HeartbeatWriter(folder.heartbeat_file(rank), os.getpid())
        self._saved = self._epoch_saved = time.monotonic()
        self._took_s = 0.0
        self._unwritten: RankSamples | None = None
        self.step = 0

    def beat(self, phase: Phase, step: int, total: int = 0) -> None:
        """Beat at once: a store to a memory map."""
        self.step = step
        self._heart.beat(phase, step, total, time.monotonic_ns())

    def save(self, samples: RankSamples, *, epoch_ended: bool = False) -> None:
        """Write the samples so far, unless that was done less than a second ago."""
        now, self._unwritten = time.monotonic(), samples
        rare = epoch_ended and now - self._epoch_saved >= self._took_s / MAX_EPOCH_SHARE
        if rare or now - self._saved >= SAVE_EVERY_S:
            self.flush_samples()
            self._saved = time.monotonic()
            self._took_s = self._saved - now
            self._epoch_saved = self._saved if epoch_ended else self._epoch_saved

    def flush_samples(self) -> None:
        """Write what was given last, where it is not written: nothing more will come."""
        if self._unwritten is not None:
            self._folder.write_samples(self._unwritten)
            self._unwritten = None

    def save_profile(self, profile: ScriptProfile) -> None:
        """Write it at once."""
        self._folder.write_profile(profile)

    def wait_for_other_ranks(self, step: int) -> None:
        """Look at the others' heartbeats until all have come so far."""
        self._await(
            lambda beat: beat.step >= step or beat.phase == Phase.FINISHED,
            meanwhile=lambda: self.beat(Phase.STEPPING, self.step),
        )

    def wait_for_idle_children(self) -> None:
        """Look at what cores they use; a heart beats meanwhile."""
        wait_for_idle_children(meanwhile=lambda: self.beat(Phase.STEPPING, self.step))

    def exit_process(self, samples: RankSamples) -> NoReturn:
        """Write the samples, wait until every rank has its own, and go without tidying up.

        A rank that is gone would take those that still exchange with it down.
        """
        self._folder.write_samples(samples)
        self.beat(Phase.FINISHED, self.step)
        self._await(lambda beat: beat.phase == Phase.FINISHED)
        kill_children()
        exit_without_cleanup(0)

    def _await(
        self, come: Callable[[HeartbeatRecord], bool], meanwhile: Callable[[], None] = lambda: None
    ) -> None:
        deadline = time.monotonic() + AWAIT_TIMEOUT_S
        while time.monotonic() < deadline:
            beats = {rank: self._folder.read_heartbeat(rank) for rank in self._others}
            if all(beat is not None and come(beat) for beat in beats.values()):
                return
            meanwhile()
            time.sleep(AWAIT_POLL_S)

    def close(self) -> None:
        """Stop beating."""
        self._heart.close()


def main() -> None:
    """Entry of a rank's own process."""
    die_with_parent()
    folder = HandoffFolder(Path(sys.argv[1]).absolute())
    rank = int(os.environ["RANK"])
    redirect_output(folder.rank_log(rank))
    with stacks_on_signal(folder.stack_file(rank)):
        ended_well = run_rank(folder, rank, int(os.environ["WORLD_SIZE"]))
    if ended_well:
        exit_after_handlers()
    exit_without_cleanup(1)


def run_rank(folder: HandoffFolder, rank: int, world_size: int) -> bool:
    """Run one rank in this process; False where it failed, with its failure in the folder."""
    observer = FolderObserver(folder, rank, world_size)
    try:
        local_rank = int(os.environ.get("LOCAL_RANK", rank))
        task = folder.read_task(rank=rank, local_rank=local_rank, world_size=world_size)
        task = enter_sandbox(task, folder)
        folder.write_samples(get_framework(task.plan.framework).run_rank(task, observer))
        observer.beat(Phase.FINISHED, observer.step)
    except Exception as error:
        traceback.print_exc()
        folder.write_failure(build_failure(error, rank, observer.step, error_location(error)))
        observer.flush_samples()
        return False
    finally:
        observer.close()
    return True


if __name__ == "__main__":
    main()
