"""The one verb: run a workload under a plan, and an ablation, and return what happened."""

from __future__ import annotations

import dataclasses
import datetime
import secrets
import time
from dataclasses import dataclass, field

from nfold.ablation import Variant
from nfold.errors import RunFailure
from nfold.frameworks.base import Framework, Observer, Task
from nfold.frameworks.registry import get_framework
from nfold.machine import Machine
from nfold.measurement import Caveat, FailureCause, Measurement, RankSamples, Status, cell_id
from nfold.plan import Plan
from nfold.run import attach, checks
from nfold.run.handoff import HandoffFolder
from nfold.run.options import RunOptions
from nfold.run.processes import spec_for_plan
from nfold.run.scratch import settle_sandbox
from nfold.run.supervise import Supervisor, TreeExit
from nfold.run.verdict import determine_status
from nfold.run.watching import TelemetrySession
from nfold.run.worker import run_rank
from nfold.turns import process_wide
from nfold.workload import Workload

MEASUREMENTS_FOLDER = "measurements"


@dataclass(frozen=True, kw_only=True)
class RunOutcome:
    """What became of the ranks, before the facts around them are added."""

    status: Status
    cause: FailureCause | None = None
    ranks: tuple[RankSamples, ...] = ()
    energy_joules: float | None = None
    caveats: tuple[Caveat, ...] = field(default=())


def run(
    workload: Workload,
    plan: Plan,
    variant: Variant | None = None,
    *,
    machine: Machine,
    options: RunOptions,
    repeat: int = 0,
    interleaved_variants: tuple[Variant, ...] = (),
) -> Measurement:
    """Run ``workload`` under the complete ``plan`` in a fresh process tree.

    With ``turns`` ``ablation`` holds all the time, and each of them has its turns, which change
    what the framework can change between two steps; ``nfold.run.turned.apart`` makes a
    measurement of each.

    A run that fails is a Measurement with its status and cause, never an exception; what its
    ranks measured before they failed is in it. Raises MachineUnfit where the machine cannot
    run anything, and ValueError for a plan that was not resolved.
    """
    if not (plan.has_placement if workload.script else plan.is_complete):
        raise ValueError("the plan is not resolved on this machine; next: plan.resolve(...)")
    checkpoint = None if variant or interleaved_variants else options.checkpoint_folder
    task = Task(
        workload=workload,
        plan=plan,
        machine=machine,
        requested_variant=variant,
        checkpoint=None if checkpoint is None else str(checkpoint.absolute()),
        checkpoint_every=options.checkpoint_every,
        repeat=repeat,
        interleaved_variants=interleaved_variants,
        replay_hints=options.replay_hints,
    )
    return _measured(task, options)


def _measured(task: Task, options: RunOptions) -> Measurement:
    """Run it, and put the facts around what happened."""
    name = _measurement_id(task, task.repeat)
    folder = HandoffFolder(options.results / MEASUREMENTS_FOLDER / name)
    started_at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    start = time.monotonic()
    outcome = _outcome(get_framework(task.plan.framework), task, folder, options)
    timed = outcome.status == "ok" and not task.interleaved_variants
    found = checks.rank_caveats(outcome.ranks, task.requested_variant) if timed else []
    return Measurement(
        id=name,
        workload=task.workload,
        plan=task.plan,
        machine=task.machine,
        status=outcome.status,
        variant=task.requested_variant,
        repeat=task.repeat,
        cause=outcome.cause,
        ranks=outcome.ranks,
        energy_joules=outcome.energy_joules,
        warnings=(*found, *outcome.caveats),
        started_at=started_at,
        wall_seconds=time.monotonic() - start,
        folder=f"{MEASUREMENTS_FOLDER}/{name}" if folder.path.exists() else None,
    )


def _measurement_id(task: Task, repeat: int) -> str:
    """Cell, repeat and a part of its own; in an attached job every rank must find the same."""
    cell = cell_id(task.workload, task.plan, task.requested_variant, task.machine)
    own = attach.job_id() if attach.in_external_job() else secrets.token_hex(3)
    return f"{cell}-{repeat}-{own}"


def _outcome(
    chosen: Framework, task: Task, folder: HandoffFolder, options: RunOptions
) -> RunOutcome:
    refusals = (
        chosen.refusal_reason(left_out, task.workload, task.plan)
        for left_out in (task.variant, *task.interleaved_variants)
    )
    reason = (
        chosen.unsupported_reason(task.workload, task.plan, task.machine)
        or next((refusal for refusal in refusals if refusal), None)
        or _interleaving_refusal(chosen, task)
    )
    if reason is not None:
        return RunOutcome(status="unsupported", cause=FailureCause(text=reason))
    if chosen.runs_in_parent:
        return _in_parent(chosen, task)
    if task.workload.script and (attach.in_external_job() or options.in_process):
        text = "a script is run in processes of its own; next: leave out torchrun or --in-process"
        return RunOutcome(status="unsupported", cause=FailureCause(text=text))
    if attach.in_external_job():
        return _attached(chosen, task, folder, options)
    folder.write_task(task)
    options.on_start(folder.path)
    if options.in_process:
        return _in_process(chosen, task, folder)
    return _in_process_tree(chosen, task, folder, options)


def _interleaving_refusal(chosen: Framework, task: Task) -> str | None:
    """Why the task's turns cannot share a run, or None."""
    switched = chosen.switchable_fields(task.workload, task.plan)
    if all(process_wide(turn, switched) == task.variant for turn in task.interleaved_variants):
        return None
    return (
        f"turns of {task.workload} differ in what cannot change between two steps; allowed are "
        f"{', '.join(switched) or 'none'}; next: run each by itself"
    )


def _in_parent(chosen: Framework, task: Task) -> RunOutcome:
    """Every rank after the other in this process: the simulated framework."""
    world_size = chosen.process_count(task.plan)
    ranks: list[RankSamples] = []
    for rank in range(world_size):
        seen = dataclasses.replace(task, rank=rank, local_rank=rank, world_size=world_size)
        try:
            ranks.append(chosen.run_rank(seen, Observer()))
        except RunFailure as error:
            cause = FailureCause(text=str(error), rank=rank, step=error.step)
            return RunOutcome(status=_status(error), cause=cause, ranks=tuple(ranks))
    return RunOutcome(status="ok", ranks=tuple(ranks))


def _status(error: RunFailure) -> Status:
    status: Status = error.status  # type: ignore[assignment]  # the tree in errors.py lists them
    return status


def _in_process(chosen: Framework, task: Task, folder: HandoffFolder) -> RunOutcome:
    """The only rank in this process, for a debugger: no supervisor, no telemetry."""
    processes = chosen.process_count(task.plan)
    if processes != 1:
        text = f"--in-process runs one rank, the plan has {processes}; next: --devices 1"
        return RunOutcome(status="unsupported", cause=FailureCause(text=text))
    run_rank(folder, rank=0, world_size=1)
    return _read_outcome(folder, TreeExit(exit_code=0), processes=1)


def _in_process_tree(
    chosen: Framework, task: Task, folder: HandoffFolder, options: RunOptions
) -> RunOutcome:
    processes = chosen.process_count(task.plan)
    gpus = _gpus(task)
    with TelemetrySession(folder, gpus, options) as telemetry:
        launch = spec_for_plan(folder, task.plan, processes, script=bool(task.workload.script))
        ending = Supervisor(folder, launch, telemetry.options).run()
    outcome = _read_outcome(folder, ending, processes)
    return RunOutcome(
        status=outcome.status,
        cause=outcome.cause,
        ranks=telemetry.with_clocks(outcome.ranks, task.variant.devices or gpus),
        energy_joules=telemetry.energy_joules(outcome.ranks),
        caveats=(
            *_leftover_process_caveats(ending.leftover_pids),
            *telemetry.caveats(outcome.ranks),
            *settle_sandbox(folder),
        ),
    )


def _gpus(task: Task) -> tuple[int, ...]:
    """Those that the run drives: rank k the k-th, unless an experiment says otherwise."""
    first, count = task.variant.device, task.plan.devices or 0
    return tuple(range(first, first + count)) if task.plan.device == "cuda" else ()


def _attached(
    chosen: Framework, task: Task, folder: HandoffFolder, options: RunOptions
) -> RunOutcome:
    """This process is one rank of a job that somebody else launched."""
    processes = chosen.process_count(task.plan)
    if processes != attach.external_world_size():
        text = (
            f"the plan needs {processes} processes, the job that nfold was started in has "
            f"{attach.external_world_size()}; next: --devices {attach.external_world_size()}"
        )
        return RunOutcome(status="unsupported", cause=FailureCause(text=text))
    ending = attach.run_external_rank(folder, task, options)
    return _read_outcome(folder, ending, processes)


def _read_outcome(folder: HandoffFolder, ending: TreeExit, processes: int) -> RunOutcome:
    ranks = folder.read_samples()
    failures, exits = folder.read_failures(), folder.read_exit_codes()
    status, cause = determine_status(ending, failures, exits, len(ranks), processes)
    held = {failure.rank: failure.peak_memory_bytes for failure in failures}
    return RunOutcome(status=status, cause=cause, ranks=_with_peaks(ranks, held))


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


def _leftover_process_caveats(pids: tuple[int, ...]) -> list[Caveat]:
    if not pids:
        return []
    text = f"processes {', '.join(map(str, pids))} of this run outlived SIGKILL by 5 s"
    return [Caveat(kind="processes_left", text=text)]
