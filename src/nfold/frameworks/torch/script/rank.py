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
from nfold.frameworks.imports import after_import
from nfold.frameworks.torch.script import divided, instead
from nfold.frameworks.torch.script.environment import alone, entered
from nfold.frameworks.torch.script.suspended import Generators
from nfold.frameworks.torch.script.trainers import Trainers
from nfold.measurement import RankSamples
from nfold.plan import FEWEST_STEPS

if TYPE_CHECKING:
    from nfold.frameworks.torch.script.watch import Watch


def run_rank(task: Task, observer: Observer) -> RankSamples:
    """Run the script until its steps are made; that ends the process.

    A script that ends before is measured as far as it came. Raises RunFailure where that is
    too short, where it ends with a code, and what it raises itself.
    """
    watches: list[Watch] = []
    trainers = Trainers(1 if alone(task) else task.world_size)
    generators = Generators(task.learnt.generators)

    def watch(_torch: ModuleType) -> None:
        from nfold.frameworks.torch.script.watch import Watch

        watches.append(Watch(task, observer, trainers))
        watches[0].install()

    others = instead.Others(task.workload.name, lambda: any(watch.steps for watch in watches))
    with entered(task):
        others.install()
        generators.install()
        after_import({"torch": watch, **trainers.actions(), **divided.actions()})
        _run(task, watches, generators)
    generators.remove()
    others.remove()
    return _ended(task, watches, observer)


def _run(task: Task, watches: list[Watch], generators: Generators) -> None:
    """The script, to its own end."""
    module, (script, *arguments) = task.workload.module, task.workload.script
    try:
        if module is None:
            execute.run_script(script, arguments, generators.compiled)
        else:
            execute.run_module(module, arguments[1:], generators.compiled)
    except SystemExit as ended:
        if ended.code not in (None, 0) and not (watches and watches[0].left):
            raise instead.exited(task.workload, ended) from ended
    except NfoldError:
        raise
    except Exception as error:
        # A trainer that tidies up may fail on what was refused, and raise that instead.
        told = (watches[0].refused or _meaning(error)) if watches else None
        told = told or instead.asks(task.workload.name, error)
        told = told or instead.in_a_package(task.workload, error)
        if told is None:
            raise
        raise told.with_traceback(error.__traceback__) from error


def _meaning(error: Exception) -> NfoldError | None:
    """What the error means to nfold, where it is more than itself."""
    from nfold.frameworks.torch.devices import devices_in_use
    from nfold.frameworks.torch.translate import told

    return told(error, devices_in_use().peak_memory_bytes)


def _ended(task: Task, watches: list[Watch], observer: Observer) -> RankSamples:
    """What was measured of a script that has ended by itself.

    Where it has left its process group standing, this process ends at once: taking the group down
    at the interpreter's end may hang.
    """
    name = task.workload.name
    if not watches:
        raise RunFailure(f"{name} ended and never imported torch: there is nothing to measure")
    from nfold.frameworks.torch.script.facts import joined

    watch = watches[0]
    if watch.refused is not None:
        raise watch.refused
    if watch.timed_steps < FEWEST_STEPS:
        counts = (watch.steps, watch.warmup_steps, watch.children)
        raise RunFailure(too_few(name, *counts, FEWEST_STEPS))
    samples = watch.samples()
    if joined():
        observer.leave(samples)
    watch.remove()
    return samples


def too_few(name: str, steps: int, warmup_steps: int, children: int, needed: int) -> str:
    """Why so few steps are nothing to measure, and what to do."""
    if not steps:
        own = f"; it started {children} processes of its own" * bool(children)
        return (
            f"{name} ended without a step of a torch optimizer{own}; next: name a script that "
            "trains in the process that it is started in, as torchrun does it, or that starts its "
            "ranks by torch.multiprocessing.spawn"
        )
    return (
        f"{name} ended after {steps} optimizer steps; needed are {needed} after a warm-up "
        f"of {warmup_steps}; next: have it train for longer"
    )
