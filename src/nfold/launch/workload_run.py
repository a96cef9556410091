"""Run a workload under a plan and a variant, and return the measurement."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import hashlib
import os
import secrets
import time
from collections.abc import Sequence

import psutil

from nfold.core.errors import MachineUnfit, RunFailure
from nfold.core.interleave import MAX_CYCLES, process_wide
from nfold.core.machine import Machine
from nfold.core.measurement import Caveat, FailureCause, Measurement, RankSamples, Status, cell_id
from nfold.core.plan import Plan
from nfold.core.redaction import redact_text
from nfold.core.variant import Variant
from nfold.core.workload import Workload
from nfold.engines.base import Framework, Observer, Phase, Task, get_framework
from nfold.launch import verdict
from nfold.launch.guardian import GUARDIAN
from nfold.launch.handoff import HandoffFolder
from nfold.launch.launch_spec import RunOptions, spec_for_plan
from nfold.launch.script_run import describe_detached
from nfold.launch.supervisor import POLL_S, Supervisor, TelemetrySession, TreeExit
from nfold.launch.verdict import Outcome, read_outcome
from nfold.launch.workload_process import run_rank, settle_sandbox
from nfold.sandbox import needs_restore, restore_command

MEASUREMENTS_FOLDER = "measurements"
LEAVE_JOB_HINT = "next: unset RANK WORLD_SIZE, or start the ranks with torchrun"


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

    ``interleaved_variants`` alternate within the run, in addition to ``variant``; they differ only
    in fields that the framework can switch between two steps. ``split_by_variant`` makes a
    measurement of each.

    A run that fails is a Measurement with its status and cause, and with the samples from before
    the failure.

    Raises:
        MachineUnfit: The machine cannot run the workload, or another run uses a file of the script.
        ValueError: The plan was not resolved.
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
        edited_sources=options.edited_sources,
        alternates=options.alternates,
    )
    return _measured(task, options)


def _measured(task: Task, options: RunOptions) -> Measurement:
    name = _measurement_id(task, task.repeat)
    folder = HandoffFolder(options.results / MEASUREMENTS_FOLDER / name)
    started_at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    start = time.monotonic()
    try:
        outcome = _outcome(get_framework(task.plan.framework), task, folder, options)
    finally:
        folder.remove_secrets()
    timed = outcome.status == "ok" and not task.interleaved_variants
    found = verdict.rank_caveats(outcome.ranks, task.requested_variant) if timed else []
    return Measurement(
        id=name,
        workload=task.workload.redact(),
        plan=task.plan,
        machine=task.machine,
        status=outcome.status,
        variant=task.requested_variant,
        repeat=task.repeat,
        cause=_redact_cause(outcome.cause),
        ranks=outcome.ranks,
        energy_joules=outcome.energy_joules,
        warnings=(*found, *outcome.caveats),
        started_at=started_at,
        wall_seconds=time.monotonic() - start,
        folder=f"{MEASUREMENTS_FOLDER}/{name}" if folder.path.exists() else None,
    )


def _redact_cause(cause: FailureCause | None) -> FailureCause | None:
    return cause and dataclasses.replace(cause, text=redact_text(cause.text))


def _measurement_id(task: Task, repeat: int) -> str:
    cell = cell_id(task.workload, task.plan, task.requested_variant, task.machine)
    own = job_id() if in_external_job() else secrets.token_hex(3)
    return f"{cell}-{repeat}-{own}"


def _outcome(chosen: Framework, task: Task, folder: HandoffFolder, options: RunOptions) -> Outcome:
    refusals = (
        chosen.refusal_reason(variant, task.workload, task.plan)
        for variant in (task.variant, *task.interleaved_variants)
    )
    reason = (
        chosen.unsupported_reason(task.workload, task.plan, task.machine)
        or next((refusal for refusal in refusals if refusal), None)
        or _interleaving_refusal(chosen, task)
    )
    if reason is not None:
        return Outcome(status="unsupported", cause=FailureCause(text=reason))
    if chosen.runs_in_parent:
        return _in_parent(chosen, task)
    if task.variant.environment(os.environ) and (in_external_job() or options.in_process):
        text = "an environment variable of the variant needs processes of its own"
        return Outcome(
            status="unsupported",
            cause=FailureCause(text=f"{text}; next: remove torchrun or --in-process"),
        )
    if task.workload.script and (in_external_job() or options.in_process):
        text = "a script needs processes of its own; next: remove torchrun or --in-process"
        return Outcome(status="unsupported", cause=FailureCause(text=text))
    if in_external_job():
        return _attached(chosen, task, folder, options)
    folder.write_task(task)
    options.on_start(folder.path)
    if options.in_process:
        return _in_process(chosen, task, folder)
    return _in_process_tree(chosen, task, folder, options)


def _interleaving_refusal(chosen: Framework, task: Task) -> str | None:
    switched = chosen.switchable_fields(task.workload, task.plan)
    if all(
        process_wide(variant, switched) == task.variant for variant in task.interleaved_variants
    ):
        return None
    return (
        f"variants of {task.workload} cannot be interleaved: between two steps nfold can change "
        f"{', '.join(switched) or 'nothing'}; next: run each variant separately"
    )


def _in_parent(chosen: Framework, task: Task) -> Outcome:
    world_size = chosen.process_count(task.plan)
    ranks: list[RankSamples] = []
    for rank in range(world_size):
        seen = dataclasses.replace(task, rank=rank, local_rank=rank, world_size=world_size)
        try:
            ranks.append(chosen.run_rank(seen, Observer()))
        except RunFailure as error:
            cause = FailureCause(text=str(error), rank=rank, step=error.step)
            return Outcome(status=_status(error), cause=cause, ranks=tuple(ranks))
    return Outcome(status="ok", ranks=tuple(ranks))


def _status(error: RunFailure) -> Status:
    status: Status = error.status  # type: ignore[assignment]  # the tree in errors.py lists them
    return status


def _in_process(chosen: Framework, task: Task, folder: HandoffFolder) -> Outcome:
    processes = chosen.process_count(task.plan)
    if processes != 1:
        text = f"--in-process runs one rank, the plan has {processes}; next: --devices 1"
        return Outcome(status="unsupported", cause=FailureCause(text=text))
    run_rank(folder, rank=0, world_size=1)
    return read_outcome(folder, TreeExit(exit_code=0), processes=1)


def _in_process_tree(
    chosen: Framework, task: Task, folder: HandoffFolder, options: RunOptions
) -> Outcome:
    processes = chosen.process_count(task.plan)
    gpus = _gpus(task)
    options.stop.abort_notice = functools.partial(_abort_notice, folder)
    with GUARDIAN.watch(folder.sandbox):
        with TelemetrySession(folder, gpus, options) as telemetry:
            launch = spec_for_plan(
                folder,
                task.plan,
                processes,
                script=bool(task.workload.script),
                variant=task.variant,
            )
            environment = {**launch.environment, **options.environment}
            launch = dataclasses.replace(launch, environment=environment)
            ending = Supervisor(folder, launch, telemetry.options).run()
        outcome = read_outcome(folder, ending, processes)
        sandbox_caveats = settle_sandbox(folder)
    options.stop.abort_notice = str
    return dataclasses.replace(
        outcome,
        ranks=telemetry.with_clocks(outcome.ranks, task.variant.devices or gpus),
        energy_joules=telemetry.energy_joules(outcome.ranks),
        caveats=(
            *_leftover_process_caveats(outcome),
            *telemetry.caveats(outcome.ranks),
            *sandbox_caveats,
        ),
    )


def _abort_notice(folder: HandoffFolder) -> str:
    sandbox = folder.sandbox
    if not needs_restore(sandbox):
        return ""
    command = restore_command(os.path.realpath(sandbox))
    return (
        "files that the script changed under absolute paths are being restored in the background; "
        f"next, if one is not: {command}"
    )


def _gpus(task: Task) -> tuple[int, ...]:
    first, count = task.variant.device, task.plan.devices or 0
    return tuple(range(first, first + count)) if task.plan.device == "cuda" else ()


def _attached(chosen: Framework, task: Task, folder: HandoffFolder, options: RunOptions) -> Outcome:
    processes = chosen.process_count(task.plan)
    if processes != external_world_size():
        text = (
            f"the plan needs {processes} processes, the job that nfold was started in has "
            f"{external_world_size()}; next: --devices {external_world_size()}"
        )
        return Outcome(status="unsupported", cause=FailureCause(text=text))
    ending = run_external_rank(folder, task, options)
    return read_outcome(folder, ending, processes)


def _leftover_process_caveats(outcome: Outcome) -> list[Caveat]:
    texts = []
    if outcome.leftover_pids:
        pids = ", ".join(map(str, outcome.leftover_pids))
        texts.append(f"processes {pids} of this run were still there 5 s after SIGKILL")
    if outcome.detached:
        texts.append(describe_detached(outcome.detached))
    return [Caveat(kind="processes_left", text=text) for text in texts]


def split_by_variant(measurement: Measurement, variants: Sequence[Variant]) -> list[Measurement]:
    """Return one measurement for each interleaved variant, with its own windows.

    If the run failed, a variant with enough steps on all ranks is ok; the others have its status.
    """
    ranks = [rank.split_windows(rank.slots, len(variants)) for rank in measurement.ranks]
    return [
        _measurement_of_variant(measurement, variant, tuple(parts[slot] for parts in ranks))
        for slot, variant in enumerate(variants)
    ]


def _measurement_of_variant(
    whole: Measurement, variant: Variant, ranks: tuple[RankSamples, ...]
) -> Measurement:
    cell = cell_id(whole.workload, whole.plan, variant or None, whole.machine)
    status: Status = "ok" if _has_enough_steps(whole.plan, ranks) else whole.status
    found = verdict.rank_caveats(ranks, variant or None) if status == "ok" else []
    return dataclasses.replace(
        whole,
        id=f"{cell}-{whole.repeat}-{whole.id.rpartition('-')[2]}",
        status=status,
        variant=variant or None,
        ranks=ranks,
        energy_joules=None,
        warnings=(*found, *whole.warnings),
    )


def _has_enough_steps(plan: Plan, ranks: Sequence[RankSamples]) -> bool:
    count = 1 if plan.strategy == "dp" else plan.devices or 1
    steps = [sum(window.steps for window in rank.windows) for rank in ranks]
    return len(ranks) == count and MAX_CYCLES * min(steps) >= (plan.steps or 1)


def in_external_job() -> bool:
    """Return whether RANK and WORLD_SIZE name this process as a rank of a running job.

    Raises MachineUnfit if what they hold names no rank, or no job that a rank can join.
    """
    values = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE") if name in os.environ}
    for name, value in values.items():
        if not value.isdecimal() or (name == "WORLD_SIZE" and int(value) < 1):
            least = 0 if name == "RANK" else 1
            raise MachineUnfit(
                f"{name}={value!r} in the environment: allowed are whole numbers from {least}; "
                f"{LEAVE_JOB_HINT}"
            )
    if len(values) == 1:
        (name,), (missing,) = values, {"RANK", "WORLD_SIZE"} - set(values)
        raise MachineUnfit(
            f"{name}={values[name]} in the environment without {missing}: a rank of a job has "
            f"both; {LEAVE_JOB_HINT}"
        )
    if not values:
        return False
    rank, world_size = int(values["RANK"]), int(values["WORLD_SIZE"])
    if rank >= world_size:
        raise MachineUnfit(
            f"RANK={rank} in the environment with WORLD_SIZE={world_size}: allowed are 0 to "
            f"{world_size - 1}; {LEAVE_JOB_HINT}"
        )
    if world_size > 1 and "MASTER_ADDR" not in os.environ:
        raise MachineUnfit(
            f"RANK={rank} and WORLD_SIZE={world_size} in the environment without MASTER_ADDR: "
            f"the ranks of a job cannot meet; {LEAVE_JOB_HINT}"
        )
    return True


def external_rank() -> int:
    """Return this process's rank in the job; 0 outside of a job."""
    return int(os.environ["RANK"]) if in_external_job() else 0


def external_world_size() -> int:
    """Return the number of processes in the job; 1 outside of a job."""
    return int(os.environ["WORLD_SIZE"]) if in_external_job() else 1


def job_id() -> str:
    """Return six hex digits that identify the job, the same on all ranks.

    The default run id and port of torchrun are the same in every job; on one node the process that
    started the ranks distinguishes jobs.
    """
    names = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "MASTER_ADDR", "MASTER_PORT")
    parts = [os.environ.get(name, "") for name in names]
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE"):
        starter = psutil.Process(os.getppid())
        parts.append(f"{starter.pid} {starter.create_time()}")
    return hashlib.sha256("|".join(parts).encode()).hexdigest()[:6]


def run_external_rank(folder: HandoffFolder, task: Task, options: RunOptions) -> TreeExit:
    """Run the rank of this process; rank 0 also waits for the samples of the other ranks.

    The folder must be visible to all ranks.
    """
    if external_rank() == 0:
        folder.write_task(task)
    elif not _wait_for_task(folder, options):
        raise TimeoutError(
            f"rank 0 wrote no task to {folder.path}; next: --results with a folder that all ranks see"
        )
    ended_well = run_rank(folder, external_rank(), external_world_size())
    if external_rank() == 0:
        return _wait_for_others(folder, options, ended_well)
    return TreeExit(exit_code=0 if ended_well else 1)


def _wait_for_task(folder: HandoffFolder, options: RunOptions) -> bool:
    deadline = time.monotonic() + options.start_timeout_s
    while not folder.has_task() and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return folder.has_task()


def _wait_for_others(folder: HandoffFolder, options: RunOptions, ended_well: bool) -> TreeExit:
    deadline = time.monotonic() + options.hang_timeout_s
    waiting = set(range(1, external_world_size()))
    while waiting and time.monotonic() < deadline:
        failed = {failure.rank for failure in folder.reports.read_failures()}
        waiting = {other for other in waiting - failed if not _finished(folder, other)}
        time.sleep(POLL_S)
    if waiting:
        beat = folder.reports.read_heartbeat(min(waiting))
        return TreeExit(hung=(min(waiting), beat.step if beat else 0))
    return TreeExit(exit_code=0 if ended_well and not folder.reports.read_failures() else 1)


def _finished(folder: HandoffFolder, other: int) -> bool:
    beat = folder.reports.read_heartbeat(other)
    return beat is not None and beat.phase == Phase.FINISHED
