"""One rank of a script: its environment, the script itself, and what was measured. No torch here.

Torch is watched from the moment the script imports it: what the script puts into the
environment before that counts, as it would by itself.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

from nfold.errors import NfoldError, RunFailure
from nfold.frameworks import execute
from nfold.frameworks.base import Observer, Task
from nfold.frameworks.imports import call_after_import
from nfold.frameworks.torch.script import divided, instead
from nfold.frameworks.torch.script.environment import has_own_world, rank_environment
from nfold.frameworks.torch.script.suspended import GeneratorHooks
from nfold.frameworks.torch.script.trainers import TrainerDetector
from nfold.measurement import RankSamples
from nfold.plan import MIN_TIMED_STEPS

if TYPE_CHECKING:
    from nfold.frameworks.torch.script.watch import InstrumentedRun


def run_rank(task: Task, observer: Observer) -> RankSamples:
    """Run the script until its steps are made; that ends the process.

    A script that ends before is measured as far as it came. Raises RunFailure where that is
    too short, where it ends with a code, and what it raises itself.
    """
    watches: list[InstrumentedRun] = []
    trainers = TrainerDetector(1 if has_own_world(task) else task.world_size)
    generators = GeneratorHooks(task.replay_hints.generator_functions)

    def watch(_torch: ModuleType) -> None:
        from nfold.frameworks.torch.script.watch import InstrumentedRun

        watches.append(InstrumentedRun(task, observer, trainers))
        watches[0].install()

    others = instead.ChildTrainingDetector(
        task.workload.name, lambda: any(watch.steps for watch in watches)
    )
    with rank_environment(task):
        others.install()
        generators.install()
        call_after_import(
            {
                "torch": watch,
                **trainers.import_actions(),
                **divided.tensor_parallel_import_actions(),
            }
        )
        _execute_script(task, watches, generators)
    generators.uninstall()
    others.uninstall()
    return _finish_early(task, watches, observer)


def _execute_script(
    task: Task, runs: list[InstrumentedRun], generator_hooks: GeneratorHooks
) -> None:
    """The script, to its own end."""
    module, (script, *arguments) = task.workload.module, task.workload.script
    try:
        if module is None:
            execute.run_script(script, arguments, generator_hooks.compile_source)
        else:
            execute.run_module(module, arguments[1:], generator_hooks.compile_source)
    except SystemExit as ended:
        if ended.code not in (None, 0) and not (runs and runs[0].is_leaving):
            raise instead.exit_failure(task.workload, ended) from ended
    except NfoldError:
        raise
    except Exception as error:
        # A trainer that tidies up may fail on what was refused, and raise that instead.
        told = (runs[0].refusal or _translate_error(error)) if runs else None
        told = told or instead.stdin_failure(task.workload.name, error)
        told = told or instead.relative_import_failure(task.workload, error)
        if told is None:
            raise
        raise told.with_traceback(error.__traceback__) from error


def _translate_error(error: Exception) -> NfoldError | None:
    """What the error means to nfold, where it is more than itself."""
    from nfold.frameworks.torch.devices import current_devices
    from nfold.frameworks.torch.translate import translate_chained_error

    return translate_chained_error(error, current_devices().peak_memory_bytes)


def _finish_early(task: Task, runs: list[InstrumentedRun], observer: Observer) -> RankSamples:
    """What was measured of a script that has ended by itself.

    Where it has left its process group standing, this process ends at once: taking the group down
    at the interpreter's end may hang.
    """
    name = task.workload.name
    if not runs:
        raise RunFailure(f"{name} ended and never imported torch: there is nothing to measure")
    from nfold.frameworks.torch.script.facts import has_process_group

    watch = runs[0]
    if watch.refusal is not None:
        raise watch.refusal
    if watch.timed_steps < MIN_TIMED_STEPS:
        counts = (watch.steps, watch.warmup_steps, watch.child_processes)
        raise RunFailure(too_few_steps_message(name, *counts, MIN_TIMED_STEPS))
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
            f"{name} ended without a step of a torch optimizer{own}; next: name a script that "
            "trains in the process that it is started in, as torchrun does it, or that starts its "
            "ranks by torch.multiprocessing.spawn"
        )
    return (
        f"{name} ended after {steps} optimizer steps; needed are {required_steps} after a warm-up "
        f"of {warmup_steps}; next: have it train for longer"
    )
