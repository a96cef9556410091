"""One rank of a script: its environment, its execution, and its result. Imports no torch.

Hooks are installed when the script imports torch: environment variables that it sets before have
their effect.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from multiprocessing import get_start_method
from multiprocessing.process import BaseProcess
from pathlib import Path
from subprocess import Popen, TimeoutExpired
from types import ModuleType
from typing import TYPE_CHECKING, Any

from nfold.core.errors import EndedEarly, NfoldError, RunFailure, Unsupported
from nfold.core.import_hooks import call_after_import
from nfold.core.measurement import RankSamples
from nfold.core.plan import MIN_TIMED_STEPS
from nfold.core.workload import MODULE_FLAG, Workload
from nfold.engines import rank_process
from nfold.engines.base import Observer, Task
from nfold.instrument.hooks.patches import (
    TENSOR_PARALLEL_MODULE,
    BatchFunctionDecorator,
    Patches,
    TrainerDetector,
    mark_parallelized,
)
from nfold.instrument.hooks.start_cores import StartCores
from nfold.instrument.rank_environment import AffinityHook, has_own_world, rank_environment

if TYPE_CHECKING:
    from nfold.instrument.session import InstrumentedRun


def run_rank(task: Task, observer: Observer) -> RankSamples:
    """Run the script until it has made its steps, which ends the process.

    A script that ends earlier is measured if it has made enough steps. Raises RunFailure if it has
    not, or if it exits with a code other than 0, and any exception of the script.
    """
    runs: list[InstrumentedRun] = []
    patches = Patches()
    trainers = TrainerDetector(1 if has_own_world(task) else task.world_size)
    decorator = BatchFunctionDecorator(task.replay_hints.function_keys, task.edited_sources)
    affinity = AffinityHook()

    def instrument(_torch: ModuleType) -> None:
        from nfold.instrument.session import InstrumentedRun

        runs.append(InstrumentedRun(task, observer, trainers, affinity))
        runs[0].install()

    children = ChildTrainingDetector(task.workload.name, lambda: any(run.steps for run in runs))
    with rank_environment(task):
        StartCores.record()
        children.install(patches)
        affinity.install(patches)
        decorator.install()
        call_after_import(
            {
                "torch": instrument,
                **trainers.import_actions(patches),
                TENSOR_PARALLEL_MODULE: partial(mark_parallelized, patches),
            }
        )
        _execute_script(task, runs, decorator)
    decorator.uninstall()
    patches.undo()
    return _finish_early(task, runs, observer)


def _execute_script(
    task: Task, runs: list[InstrumentedRun], decorator: BatchFunctionDecorator
) -> None:
    module, (script, *arguments) = task.workload.module, task.workload.script
    try:
        if module is None:
            rank_process.run_script(script, arguments, decorator.compile_source)
        else:
            rank_process.run_module(module, arguments[1:], decorator.compile_source)
    except SystemExit as ended:
        if ended.code not in (None, 0) and not (runs and runs[0].is_leaving):
            raise exit_failure(task.workload, ended) from ended
    except NfoldError:
        raise
    except Exception as error:
        failure: NfoldError | None = None
        if runs:
            from nfold.engines.torch.devices import current_devices
            from nfold.engines.torch.error_translation import translate_chained_error

            # A trainer may handle a refusal, and raise another error during its cleanup.
            failure = runs[0].refusal or translate_chained_error(
                error, current_devices().peak_memory_bytes
            )
        failure = failure or stdin_failure(task.workload.name, error)
        failure = failure or relative_import_failure(task.workload, error)
        if failure is None:
            raise
        raise failure.with_traceback(error.__traceback__) from error


def _finish_early(task: Task, runs: list[InstrumentedRun], observer: Observer) -> RankSamples:
    """Return the samples of a script that ended by itself.

    If its process group still exists, end the process: destroying the group at exit may hang.
    """
    name = task.workload.name
    if not runs:
        raise Unsupported(
            f"{name} ended with exit code 0 and never imported torch: there is nothing to measure",
            step=0,
        )
    from nfold.instrument.script_profiler import has_process_group

    run = runs[0]
    if run.refusal is not None:
        raise run.refusal
    if run.timed_steps < MIN_TIMED_STEPS:
        counts = (run.steps, run.warmup_steps, run.child_processes)
        message = too_few_steps_message(name, *counts, MIN_TIMED_STEPS)
        raise EndedEarly(message, step=run.steps, left_at=run.left_at)
    samples = dataclasses.replace(run.samples(), left_at=run.left_at or "")
    if has_process_group():
        observer.exit_process(samples)
    run.uninstall()
    return samples


def too_few_steps_message(
    name: str, steps: int, warmup_steps: int, child_processes: int, required_steps: int
) -> str:
    if not steps:
        children = f"; it started {child_processes} processes" * bool(child_processes)
        return (
            f"{name} ended with exit code 0 without a step of a torch optimizer{children}; next: add "
            "nfold.mark_step() after each update of the parameters, or name a script that trains in "
            "its own process, as under torchrun, or that starts its ranks by "
            "torch.multiprocessing.spawn"
        )
    return (
        f"{name} ended with exit code 0 after {steps} optimizer steps; required are "
        f"{required_steps} after {warmup_steps} warm-up steps; next: train for longer"
    )


CHILD_TRAINING_LIMIT_S = 30.0  # a child that has loaded PyTorch may prepare data for so long
CHILD_CHECK_INTERVAL_S = 2.0
TORCH_LIBRARY = "libtorch"
USAGE_EXIT_CODE = 2  # wrong command-line arguments


def exit_failure(script: Workload, exit_error: SystemExit) -> RunFailure:
    message = _exit_message(exit_error)
    reason = f": {message}" if message else f" with code {exit_error.code!r}"
    target = script.name if script.module is None else f"{MODULE_FLAG} {script.module}"
    advice = f"run it by hand: python {script}"
    if exit_error.code == USAGE_EXIT_CODE:
        advice = f"pass its arguments after --, as in {target} -- --epochs 3"
    return RunFailure(f"{script.name} exited{reason}; next: {advice}")


def _exit_message(exit_error: SystemExit) -> str | None:
    if isinstance(exit_error.code, str):
        return exit_error.code
    for frame, _ in traceback.walk_tb(exit_error.__traceback__):
        if (frame.f_globals.get("__name__"), frame.f_code.co_name) == ("argparse", "error"):
            return str(frame.f_locals.get("message"))
    return str(exit_error.__context__) if exit_error.__context__ is not None else None


def stdin_failure(name: str, error: BaseException) -> RunFailure | None:
    """Return the failure of a script that calls ``input()``, else None."""
    if not isinstance(error, EOFError) or "reading a line" not in str(error):
        return None
    return RunFailure(
        f"{name} reads standard input, which is closed; next: pass its input as arguments or "
        "environment variables"
    )


def relative_import_failure(script: Workload, error: BaseException) -> RunFailure | None:
    """Return the failure of a file that only runs as a module of its package, else None."""
    relative = isinstance(error, ImportError) and "no known parent package" in str(error)
    if not relative or script.module is not None:
        return None
    file = Path(script.script[0]).absolute()
    names, folder = [file.parent.name, file.stem], file.parent.parent
    while (folder / "__init__.py").exists():
        names, folder = [folder.name, *names], folder.parent
    return RunFailure(
        f"{script.name} uses relative imports: it is a module of a package; next: "
        f"{MODULE_FLAG} {'.'.join(names)} in place of its path, in the parent folder of the package"
    )


class ChildTrainingDetector:
    """Raises RunFailure if the script only waits for a child process that trains.

    A script that has made a step itself may wait. Forked processes are instrumented themselves.
    """

    def __init__(self, name: str, has_stepped: Callable[[], bool]) -> None:
        self._name = name
        self._has_stepped = has_stepped

    def install(self, patches: Patches) -> None:
        patches.wrap(Popen, "wait", self._wait_for_popen)
        patches.wrap(BaseProcess, "join", self._join_process)

    def _wait_for_popen(self, original: Any, process: Any, timeout: float | None = None) -> Any:
        for seconds in self._check_intervals(process.pid) if timeout is None else ():
            with suppress(TimeoutExpired):
                return original(process, seconds)
        return original(process, timeout)

    def _join_process(self, original: Any, process: Any, timeout: float | None = None) -> None:
        is_forked = (getattr(process, "_start_method", None) or get_start_method()) == "fork"
        if timeout is None and process.pid and not is_forked:
            for seconds in self._check_intervals(process.pid):
                original(process, seconds)
                if process.exitcode is not None:
                    return
        original(process, timeout)

    def _check_intervals(self, pid: int) -> Iterator[float]:
        start = time.monotonic()
        while not self._has_stepped():
            yield CHILD_CHECK_INTERVAL_S
            waited_s = time.monotonic() - start
            if waited_s > CHILD_TRAINING_LIMIT_S and not self._has_stepped():
                command = torch_command(pid)
                if command is not None:
                    raise RunFailure(_child_training_message(self._name, command, waited_s))


def torch_command(pid: int) -> list[str] | None:
    """Return the command of the process or its last descendant that has loaded PyTorch."""
    found = [child for child in _process_tree(pid) if TORCH_LIBRARY in _read_proc(child, "maps")]
    command = _read_proc(found[-1], "cmdline") if found else ""
    return command.strip("\0").split("\0") if command else None


def _process_tree(pid: int) -> list[int]:
    pids = [pid]
    for parent in pids:
        children = (file.read_text() for file in Path(f"/proc/{parent}/task").glob("*/children"))
        with suppress(OSError):
            pids += [int(child) for text in children for child in text.split()]
    return pids


def _read_proc(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    except OSError:
        return ""


def _child_training_message(name: str, command: list[str], waited_s: float) -> str:
    index = next((i for i, part in enumerate(command) if part.endswith(".py")), None)
    process = "started by multiprocessing"
    advice = "start ranks by torch.multiprocessing.spawn, or let nfold start them as torchrun does"
    if index is not None:
        script, *arguments = os.path.basename(command[index]), *command[index + 1 :]
        process = shlex.join([script, *arguments])
        own = shlex.join([script, *["--"][: len(arguments)], *arguments])
        advice = f"{own} in place of {name}"
    return (
        f"{name} makes no step: it has waited {waited_s:.0f} s for a child process ({process}), "
        f"and child processes are not measured; next: {advice}"
    )
