"""The one verb: run a workload under a plan, and an ablation, and return what happened."""

from __future__ import annotations

import dataclasses
import datetime
import secrets
import time
from dataclasses import dataclass, field

from nfold.ablation import Ablation
from nfold.errors import RunFailure
from nfold.frameworks.base import Framework, Observer, Task
from nfold.frameworks.registry import framework
from nfold.machine import Machine
from nfold.measurement import Cause, Doubt, Measurement, RankSamples, Status, cell_id
from nfold.plan import Plan
from nfold.run import attach, checks
from nfold.run.handoff import Folder
from nfold.run.options import Options
from nfold.run.processes import of_plan
from nfold.run.scratch import settle
from nfold.run.supervise import Ending, Supervisor
from nfold.run.verdict import verdict
from nfold.run.watching import Telemetry
from nfold.run.worker import run_rank
from nfold.turns import held
from nfold.workload import Workload

FOLDER = "measurements"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of the ranks, before the facts around them are added."""

    status: Status
    cause: Cause | None = None
    ranks: tuple[RankSamples, ...] = ()
    energy_joules: float | None = None
    doubts: tuple[Doubt, ...] = field(default=())


def run(
    workload: Workload,
    plan: Plan,
    ablation: Ablation | None = None,
    *,
    machine: Machine,
    options: Options,
    repeat: int = 0,
    turns: tuple[Ablation, ...] = (),
) -> Measurement:
    """Run ``workload`` under the complete ``plan`` in a fresh process tree.

    With ``turns`` ``ablation`` holds all the time, and each of them has its turns, which change
    what the framework can change between two steps; ``nfold.run.turned.apart`` makes a
    measurement of each.

    A run that fails is a Measurement with its status and cause, never an exception; what its
    ranks measured before they failed is in it. Raises MachineUnfit where the machine cannot
    run anything, and ValueError for a plan that was not resolved.
    """
    if not (plan.placed if workload.script else plan.complete):
        raise ValueError("the plan is not resolved on this machine; next: plan.resolve(...)")
    checkpoint = None if ablation or turns else options.checkpoint
    task = Task(
        workload=workload,
        plan=plan,
        machine=machine,
        ablation=ablation,
        checkpoint=None if checkpoint is None else str(checkpoint.absolute()),
        checkpoint_every=options.checkpoint_every,
        repeat=repeat,
        turns=turns,
        learnt=options.learnt,
    )
    return _measured(task, options)


def _measured(task: Task, options: Options) -> Measurement:
    """Run it, and put the facts around what happened."""
    name = _measurement_id(task, task.repeat)
    folder = Folder(options.results / FOLDER / name)
    started_at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    start = time.monotonic()
    outcome = _outcome(framework(task.plan.framework), task, folder, options)
    timed = outcome.status == "ok" and not task.turns
    found = checks.doubts(outcome.ranks, task.ablation) if timed else []
    return Measurement(
        id=name,
        workload=task.workload,
        plan=task.plan,
        machine=task.machine,
        status=outcome.status,
        ablation=task.ablation,
        repeat=task.repeat,
        cause=outcome.cause,
        ranks=outcome.ranks,
        energy_joules=outcome.energy_joules,
        warnings=(*found, *outcome.doubts),
        started_at=started_at,
        wall_seconds=time.monotonic() - start,
        folder=f"{FOLDER}/{name}" if folder.path.exists() else None,
    )


def _measurement_id(task: Task, repeat: int) -> str:
    """Cell, repeat and a part of its own; in an attached job every rank must find the same."""
    cell = cell_id(task.workload, task.plan, task.ablation, task.machine)
    own = attach.job_id() if attach.attached() else secrets.token_hex(3)
    return f"{cell}-{repeat}-{own}"


def _outcome(chosen: Framework, task: Task, folder: Folder, options: Options) -> Outcome:
    refusals = (
        chosen.refuses(left_out, task.workload, task.plan)
        for left_out in (task.left_out, *task.turns)
    )
    reason = (
        chosen.unsupported(task.workload, task.plan, task.machine)
        or next((refusal for refusal in refusals if refusal), None)
        or _apart(chosen, task)
    )
    if reason is not None:
        return Outcome(status="unsupported", cause=Cause(text=reason))
    if chosen.in_parent:
        return _in_parent(chosen, task)
    if task.workload.script and (attach.attached() or options.in_process):
        text = "a script is run in processes of its own; next: leave out torchrun or --in-process"
        return Outcome(status="unsupported", cause=Cause(text=text))
    if attach.attached():
        return _attached(chosen, task, folder, options)
    folder.write_task(task)
    options.started(folder.path)
    if options.in_process:
        return _in_process(chosen, task, folder)
    return _in_process_tree(chosen, task, folder, options)


def _apart(chosen: Framework, task: Task) -> str | None:
    """Why the task's turns cannot share a run, or None."""
    switched = chosen.switches(task.workload, task.plan)
    if all(held(turn, switched) == task.left_out for turn in task.turns):
        return None
    return (
        f"turns of {task.workload} differ in what cannot change between two steps; allowed are "
        f"{', '.join(switched) or 'none'}; next: run each by itself"
    )


def _in_parent(chosen: Framework, task: Task) -> Outcome:
    """Every rank after the other in this process: the simulated framework."""
    world_size = chosen.processes(task.plan)
    ranks: list[RankSamples] = []
    for rank in range(world_size):
        seen = dataclasses.replace(task, rank=rank, local_rank=rank, world_size=world_size)
        try:
            ranks.append(chosen.run_rank(seen, Observer()))
        except RunFailure as error:
            cause = Cause(text=str(error), rank=rank, step=error.step)
            return Outcome(status=_status(error), cause=cause, ranks=tuple(ranks))
    return Outcome(status="ok", ranks=tuple(ranks))


def _status(error: RunFailure) -> Status:
    status: Status = error.status  # type: ignore[assignment]  # the tree in errors.py lists them
    return status


def _in_process(chosen: Framework, task: Task, folder: Folder) -> Outcome:
    """The only rank in this process, for a debugger: no supervisor, no telemetry."""
    processes = chosen.processes(task.plan)
    if processes != 1:
        text = f"--in-process runs one rank, the plan has {processes}; next: --devices 1"
        return Outcome(status="unsupported", cause=Cause(text=text))
    run_rank(folder, rank=0, world_size=1)
    return _read_outcome(folder, Ending(exit_code=0), processes=1)


def _in_process_tree(chosen: Framework, task: Task, folder: Folder, options: Options) -> Outcome:
    processes = chosen.processes(task.plan)
    gpus = _gpus(task)
    with Telemetry(folder, gpus, options) as telemetry:
        launch = of_plan(folder, task.plan, processes, script=bool(task.workload.script))
        ending = Supervisor(folder, launch, telemetry.options).run()
    outcome = _read_outcome(folder, ending, processes)
    return Outcome(
        status=outcome.status,
        cause=outcome.cause,
        ranks=telemetry.clocked(outcome.ranks, task.left_out.devices or gpus),
        energy_joules=telemetry.energy_joules(outcome.ranks),
        doubts=(*_left_behind(ending.left), *telemetry.doubts(outcome.ranks), *settle(folder)),
    )


def _gpus(task: Task) -> tuple[int, ...]:
    """Those that the run drives: rank k the k-th, unless an experiment says otherwise."""
    first, count = task.left_out.device, task.plan.devices or 0
    return tuple(range(first, first + count)) if task.plan.device == "cuda" else ()


def _attached(chosen: Framework, task: Task, folder: Folder, options: Options) -> Outcome:
    """This process is one rank of a job that somebody else launched."""
    processes = chosen.processes(task.plan)
    if processes != attach.world_size():
        text = (
            f"the plan needs {processes} processes, the job that nfold was started in has "
            f"{attach.world_size()}; next: --devices {attach.world_size()}"
        )
        return Outcome(status="unsupported", cause=Cause(text=text))
    ending = attach.run(folder, task, options)
    return _read_outcome(folder, ending, processes)


def _read_outcome(folder: Folder, ending: Ending, processes: int) -> Outcome:
    ranks = folder.read_samples()
    failures, exits = folder.read_failures(), folder.read_exits()
    status, cause = verdict(ending, failures, exits, len(ranks), processes)
    held = {failure.rank: failure.peak_memory_bytes for failure in failures}
    return Outcome(status=status, cause=cause, ranks=_with_peaks(ranks, held))


def _with_peaks(
    ranks: tuple[RankSamples, ...], held: dict[int, int | None]
) -> tuple[RankSamples, ...]:
    """The samples, with the memory that failed ranks held when they failed."""
    kept = {rank.rank: rank for rank in ranks}
    for rank, peak in held.items():
        if peak is not None:
            samples = kept.get(rank, RankSamples(rank=rank, device=""))
            kept[rank] = dataclasses.replace(samples, peak_memory_bytes=peak)
    return tuple(kept[rank] for rank in sorted(kept))


def _left_behind(pids: tuple[int, ...]) -> list[Doubt]:
    if not pids:
        return []
    text = f"processes {', '.join(map(str, pids))} of this run outlived SIGKILL by 5 s"
    return [Doubt(kind="processes_left", text=text)]
