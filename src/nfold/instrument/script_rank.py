"""One rank of a script: its environment, the script itself, and what was measured. No torch here.

Torch is watched from the moment the script imports it: what the script puts into the
environment before that counts, as it would by itself.
"""

from __future__ import annotations

import os
import shlex
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing import get_start_method
from multiprocessing.process import BaseProcess
from pathlib import Path
from subprocess import Popen, TimeoutExpired
from types import ModuleType
from typing import TYPE_CHECKING, Any

from nfold.core.errors import NfoldError, RunFailure, Unsupported
from nfold.core.import_hooks import call_after_import
from nfold.core.measurement import RankSamples
from nfold.core.plan import MIN_TIMED_STEPS
from nfold.core.workload import MODULE_FLAG, Workload
from nfold.engines import rank_process
from nfold.engines.base import Observer, Task
from nfold.instrument.hooks import patches
from nfold.instrument.hooks.patches import GeneratorHooks, Patches, TrainerDetector
from nfold.instrument.rank_environment import has_own_world, rank_environment

if TYPE_CHECKING:
    from nfold.instrument.session import InstrumentedRun


def run_rank(task: Task, observer: Observer) -> RankSamples:
    """Run the script until its steps are made; that ends the process.

    A script that ends before is measured as far as it came. Raises RunFailure where that is
    too short, where it ends with a code, and what it raises itself.
    """
    watches: list[InstrumentedRun] = []
    trainers = TrainerDetector(1 if has_own_world(task) else task.world_size)
    generators = GeneratorHooks(task.replay_hints.generator_functions)

    def watch(_torch: ModuleType) -> None:
        from nfold.instrument.session import InstrumentedRun

        watches.append(InstrumentedRun(task, observer, trainers))
        watches[0].install()

    others = ChildTrainingDetector(
        task.workload.name, lambda: any(watch.steps for watch in watches)
    )
    with rank_environment(task):
        others.install()
        generators.install()
        call_after_import(
            {
                "torch": watch,
                **trainers.import_actions(),
                **patches.tensor_parallel_import_actions(),
            }
        )
        _execute_script(task, watches, generators)
    generators.uninstall()
    others.uninstall()
    return _finish_early(task, watches, observer)


def _execute_script(
    task: Task, runs: list[InstrumentedRun], generator_hooks: GeneratorHooks
) -> None:
    module, (script, *arguments) = task.workload.module, task.workload.script
    try:
        if module is None:
            rank_process.run_script(script, arguments, generator_hooks.compile_source)
        else:
            rank_process.run_module(module, arguments[1:], generator_hooks.compile_source)
    except SystemExit as ended:
        if ended.code not in (None, 0) and not (runs and runs[0].is_leaving):
            raise exit_failure(task.workload, ended) from ended
    except NfoldError:
        raise
    except Exception as error:
        # A trainer that tidies up may fail on what was refused, and raise that instead.
        told = (runs[0].refusal or _translate_error(error)) if runs else None
        told = told or stdin_failure(task.workload.name, error)
        told = told or relative_import_failure(task.workload, error)
        if told is None:
            raise
        raise told.with_traceback(error.__traceback__) from error


def _translate_error(error: Exception) -> NfoldError | None:
    from nfold.engines.torch.devices import current_devices
    from nfold.engines.torch.error_translation import translate_chained_error

    return translate_chained_error(error, current_devices().peak_memory_bytes)


def _finish_early(task: Task, runs: list[InstrumentedRun], observer: Observer) -> RankSamples:
    """What was measured of a script that has ended by itself.

    Where it has left its process group standing, this process ends at once: taking the group down
    at the interpreter's end may hang.
    """
    name = task.workload.name
    if not runs:
        raise Unsupported(
            f"{name} ended with exit code 0 and never imported torch: there is nothing to measure",
            step=0,
        )
    from nfold.instrument.script_profiler import has_process_group

    watch = runs[0]
    if watch.refusal is not None:
        raise watch.refusal
    if watch.timed_steps < MIN_TIMED_STEPS:
        counts = (watch.steps, watch.warmup_steps, watch.child_processes)
        raise Unsupported(too_few_steps_message(name, *counts, MIN_TIMED_STEPS), step=watch.steps)
    samples = watch.samples()
    if has_process_group():
        observer.exit_process(samples)
    watch.uninstall()
    return samples


def too_few_steps_message(
    name: str, steps: int, warmup_steps: int, child_processes: int, required_steps: int
) -> str:
    """Why so few steps are nothing to measure, and what to do."""
    if not steps:
        own = f"; it started {child_processes} processes of its own" * bool(child_processes)
        return (
            f"{name} ended with exit code 0 after 0 steps of a torch optimizer{own}; next: name a script that "
            "trains in the process that it is started in, as torchrun does it, or that starts its "
            "ranks by torch.multiprocessing.spawn"
        )
    return (
        f"{name} ended with exit code 0 after {steps} optimizer steps; needed are {required_steps} after a warm-up "
        f"of {warmup_steps}; next: have it train for longer"
    )


# What a script does in place of training: it asks for arguments or input, or waits for others.
#
# Imports no torch: the script may never do so.

CHILD_TRAINING_LIMIT_S = 30.0
"""For a process that has PyTorch in its memory: it may prepare data for a while."""
CHILD_CHECK_INTERVAL_S = 2.0
TORCH_LIBRARY = "libtorch"
USAGE_EXIT_CODE = 2
"""The exit status of a command that was not understood."""


def exit_failure(script: Workload, exit_error: SystemExit) -> RunFailure:
    """A script that ended by itself with a code other than 0."""
    said = _exit_message(exit_error)
    told = f": {said}" if said else f" with {exit_error.code!r}"
    by_hand = f"run it by hand: python {script}"
    target = script.name if script.module is None else f"{MODULE_FLAG} {script.module}"
    follows = f"its arguments follow --, as in nfold explain {target} -- --epochs 3"
    return RunFailure(
        f"{script.name} ended by itself{told}; next: {follows if exit_error.code == USAGE_EXIT_CODE else by_hand}"
    )


def _exit_message(exit_error: SystemExit) -> str | None:
    if isinstance(exit_error.code, str):
        return exit_error.code
    for frame, _ in traceback.walk_tb(exit_error.__traceback__):
        if (frame.f_globals.get("__name__"), frame.f_code.co_name) == ("argparse", "error"):
            return str(frame.f_locals.get("message"))
    return str(exit_error.__context__) if exit_error.__context__ is not None else None


def stdin_failure(name: str, error: BaseException) -> RunFailure | None:
    """A script that wants an answer to ``input()``: nobody gives one here."""
    if not isinstance(error, EOFError) or "reading a line" not in str(error):
        return None
    return RunFailure(
        f"{name} reads standard input, where nobody answers while it is explained; next: give it "
        "what it asks for as an argument, or by the environment"
    )


def relative_import_failure(script: Workload, error: BaseException) -> RunFailure | None:
    """A file of a package, which only works as its module: it imports relative to itself."""
    relative = isinstance(error, ImportError) and "no known parent package" in str(error)
    if not relative or script.module is not None:
        return None
    file = Path(script.script[0]).absolute()
    names, folder = [file.parent.name, file.stem], file.parent.parent
    while (folder / "__init__.py").exists():
        names, folder = [folder.name, *names], folder.parent
    return RunFailure(
        f"{script.name} is a module of a package: it imports relative to itself; next: nfold "
        f"explain {MODULE_FLAG} {'.'.join(names)}, from the folder that the package is in"
    )


class ChildTrainingDetector:
    """Notices that the script only waits for a process of its own, which trains in its place.

    ``stepped`` says whether the script has made a step itself: then it may wait for as long as it
    likes. Processes by fork are watched themselves.
    """

    def __init__(self, name: str, has_stepped: Callable[[], bool]) -> None:
        self._name = name
        self._has_stepped = has_stepped
        self._patches = Patches()

    def install(self) -> None:
        """Stand in front of all waiting without an end."""
        self._patches.put(Popen, "wait", self._wrap_popen_wait)
        self._patches.put(BaseProcess, "join", self._wrap_process_join)

    def uninstall(self) -> None:
        """Put Python back as it was."""
        self._patches.undo()

    def _wrap_popen_wait(self, usual: Any) -> Any:
        def wait(process: Any, timeout: float | None = None) -> Any:
            if timeout is not None:
                return usual(process, timeout)
            for until in self._check_intervals(process.pid):
                try:
                    return usual(process, until)
                except TimeoutExpired:
                    continue
            return usual(process, None)

        return wait

    def _wrap_process_join(self, usual: Any) -> Any:
        def join(process: Any, timeout: float | None = None) -> None:
            forked = (getattr(process, "_start_method", None) or get_start_method()) == "fork"
            if timeout is None and process.pid and not forked:
                for until in self._check_intervals(process.pid):
                    usual(process, until)
                    if process.exitcode is not None:
                        return
            usual(process, timeout)

        return join

    def _check_intervals(self, pid: int) -> Iterator[float]:
        began = time.monotonic()
        while not self._has_stepped():
            yield CHILD_CHECK_INTERVAL_S
            if time.monotonic() - began > CHILD_TRAINING_LIMIT_S and not self._has_stepped():
                command = torch_command(pid)
                if command is not None:
                    raise RunFailure(
                        _child_training_message(self._name, command, time.monotonic() - began)
                    )


def torch_command(pid: int) -> list[str] | None:
    """The command of the process, or the last that it has started, with PyTorch in its memory."""
    found = [one for one in _process_tree(pid) if TORCH_LIBRARY in _read_proc_file(one, "maps")]
    command = _read_proc_file(found[-1], "cmdline") if found else ""
    return command.strip("\0").split("\0") if command else None


def _process_tree(pid: int) -> list[int]:
    found = [pid]
    for one in found:
        started = (file.read_text() for file in Path(f"/proc/{one}/task").glob("*/children"))
        with suppress(OSError):
            found += [int(child) for children in started for child in children.split()]
    return found


def _read_proc_file(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    except OSError:
        return ""


def _child_training_message(name: str, command: list[str], waited_s: float) -> str:
    at = next((at for at, part in enumerate(command) if part.endswith(".py")), None)
    process = "one by multiprocessing"
    following = (
        "start ranks by torch.multiprocessing.spawn, or let nfold start them as torchrun does"
    )
    if at is not None:
        script, *arguments = os.path.basename(command[at]), *command[at + 1 :]
        process = shlex.join([script, *arguments])
        following = shlex.join(["nfold", "explain", script, *["--"][: len(arguments)], *arguments])
    return (
        f"{name} makes no step: for {waited_s:.0f} s it has waited for a process that it started "
        f"({process}), and what others train is not followed; next: {following}"
    )
