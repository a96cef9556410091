"""One rank of a user's script under ``nfold run``: runs it as ``python script`` does.

    python -P -m nfold.launch.script_process FOLDER KIND CORES TARGET [ARGS...]

KIND is ``script``, ``module`` or ``program``; CORES is the number of cores of one CPU device, 0 for
no affinity. RANK, LOCAL_RANK and WORLD_SIZE are set as by torchrun. Imports only the standard
library and nfold, without torch: the script decides what else is imported.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import os
import signal
import sys
import time
import traceback
import types
from pathlib import Path
from typing import Any

from nfold.core.child_process import die_with_parent, empty_stdin
from nfold.core.import_hooks import call_after_import
from nfold.core.source_location import error_location
from nfold.engines import rank_process
from nfold.engines.base import Phase
from nfold.engines.rank_process import core_share
from nfold.instrument.run_remedies import REMEDIES_VARIABLE, RemediedProcess
from nfold.launch.handoff import HandoffFolder, HeartbeatWriter, RankFailure
from nfold.launch.rank_lifecycle import (
    build_failure,
    exit_after_handlers,
    redirect_output,
    stacks_on_signal,
)
from nfold.launch.rank_terminal import open_terminal, provide_terminal_size
from nfold.launch.step_watch import WATCH_VARIABLE, StepRecorder, StepWatch


def main() -> None:
    die_with_parent()
    folder, rank = HandoffFolder(Path(sys.argv[1])), int(os.environ["RANK"])
    kind, cores, target, *arguments = sys.argv[2:]
    _start_rank(folder, rank, int(os.environ["LOCAL_RANK"]), int(cores))
    if os.environ.pop(WATCH_VARIABLE, None):
        recorder = StepRecorder(folder.watch_file(rank), rank)
        StepWatch(recorder).install()
        atexit.register(recorder.write)
    remedies = os.environ.pop(REMEDIES_VARIABLE, None)
    if remedies:
        process = RemediedProcess(remedies, folder.path, rank)
        process.install()
        atexit.register(process.write_report)
    with stacks_on_signal(folder.stack_file(rank)):
        InferredHeartbeat(folder, rank).install()
        run_target(folder, rank, kind, target, arguments)
    exit_after_handlers()


class InferredHeartbeat:
    """Reports the optimizer steps and the DataLoader batches of a script as signs of life.

    A script that uses ``nfold.Run`` reports itself: then the heartbeat of nfold.Run replaces the
    file of this one.
    """

    def __init__(self, folder: HandoffFolder, rank: int) -> None:
        self._pid = os.getpid()
        self._writer = HeartbeatWriter(
            folder.reports.heartbeat_file(rank), self._pid, is_inferred=True
        )
        self._steps = 0

    def install(self) -> None:
        call_after_import(
            {
                "torch.optim.optimizer": self._watch_optimizers,
                "torch.utils.data.dataloader": self._watch_loaders,
            }
        )

    def _watch_optimizers(self, module: Any) -> None:
        torch, beat = module.torch, self._beat

        def on_step(*_: Any) -> None:
            # A compiled step is traced: then the hook must leave nothing in its graph.
            if not torch.compiler.is_compiling():
                beat(steps=1)

        module.register_optimizer_step_post_hook(on_step)

    def _watch_loaders(self, module: Any) -> None:
        iterator_class = getattr(module, "_BaseDataLoaderIter", None)
        original = getattr(iterator_class, "__next__", None)
        if original is None:
            return

        @functools.wraps(original)
        def next_batch(iterator: Any) -> Any:
            batch = original(iterator)
            self._beat(steps=0)
            return batch

        iterator_class.__next__ = next_batch  # type: ignore[union-attr]

    def _beat(self, steps: int) -> None:
        if os.getpid() != self._pid:  # a forked child of the rank
            return
        self._steps += steps
        phase = Phase.STEPPING if self._steps else Phase.FIRST_STEP
        self._writer.beat(phase, self._steps, 0, time.monotonic_ns())


def run_target(
    folder: HandoffFolder, rank: int, kind: str, target: str, arguments: list[str]
) -> None:
    """Run the target to its end; writes a RankFailure and exits with the code of the script.

    An uncaught exception goes through ``sys.excepthook`` without the frames of nfold.
    """
    try:
        rank_process.RUNNERS[kind](target, arguments)
    except SystemExit as ended:
        if ended.code not in (None, 0):
            folder.reports.write_failure(script_failure(ended, rank, _step(folder, rank)))
            raise
    except KeyboardInterrupt:
        exit_after_handlers(128 + signal.SIGINT)  # nfold itself reports the request to stop
    except Exception as error:
        folder.reports.write_failure(script_failure(error, rank, _step(folder, rank)))
        own = error.with_traceback(_own_frames(error.__traceback__))
        sys.excepthook(type(own), own, own.__traceback__)
        sys.exit(1)
    _report_finished(folder, rank)


def script_failure(error: BaseException, rank: int, step: int | None) -> RankFailure:
    """Return why a script failed: its exception and its source location in the user's code."""
    failure = build_failure(_translate_error(error), rank, step, error_location(error))
    return dataclasses.replace(failure, traceback="".join(traceback.format_exception(error)))


def _translate_error(error: BaseException) -> BaseException:
    # A script may wrap an error of PyTorch: its causes are translated, too.
    if "torch" not in sys.modules:
        return error
    from nfold.engines.torch.devices import current_devices
    from nfold.engines.torch.error_translation import translate_chained_error

    return translate_chained_error(error, current_devices().peak_memory_bytes) or error


def _own_frames(trace: types.TracebackType | None) -> types.TracebackType | None:
    ours = (__file__, rank_process.__file__, "<frozen runpy>")
    while trace is not None and trace.tb_frame.f_code.co_filename in ours:
        trace = trace.tb_next
    return trace


def _start_rank(folder: HandoffFolder, rank: int, local_rank: int, cores: int) -> None:
    redirect_output(folder.rank_log(rank))
    folder.reset_rank(rank, local_rank)
    provide_terminal_size()
    if rank != 0:  # torchelastic lets all ranks read the same input
        empty_stdin()
        open_terminal()
    if cores and hasattr(os, "sched_setaffinity"):
        allowed = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, core_share(allowed, cores, local_rank))


def _step(folder: HandoffFolder, rank: int) -> int | None:
    beat = folder.reports.read_heartbeat(rank)
    return beat.step if beat else None


def _report_finished(folder: HandoffFolder, rank: int) -> None:
    beat = folder.reports.read_heartbeat(rank)
    if beat is not None:
        file = folder.reports.heartbeat_file(rank)
        heart = HeartbeatWriter(file, os.getpid(), is_inferred=beat.is_inferred)
        heart.beat(Phase.FINISHED, beat.step, beat.total, time.monotonic_ns())
        heart.close()


if __name__ == "__main__":
    main()
