"""The parent of ``nfold run``: start the ranks of a script, follow them, report the outcome.

results/runs/<time-name-random>/
run.json        options and, at the end, the outcome
rank-K.log      output of rank K
error-K.json    why rank K failed
agent.log       output of torchelastic
telemetry.csv   devices and host over time
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import re
import secrets
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from nfold.core.errors import StoreUnusable, UsageError
from nfold.core.machine import Machine
from nfold.core.measurement import FailureCause
from nfold.core.redaction import abbreviate_home, redact_arguments, redact_text
from nfold.core.serialization import serialize
from nfold.core.source_location import display_path
from nfold.core.variant import RunRemedies
from nfold.instrument.run_remedies import REMEDIES_VARIABLE
from nfold.launch.guardian import GUARDIAN
from nfold.launch.handoff import HandoffFolder, RankFailure
from nfold.launch.launch_spec import (
    ProcessSpec,
    RankGroup,
    RunOptions,
    StopRequest,
    agent_command,
    module_command,
    rank_environment,
)
from nfold.launch.step_watch import WATCH_VARIABLE
from nfold.launch.supervisor import Supervisor, TelemetrySession, TreeExit
from nfold.launch.torchrun_args import (
    Rendezvous,
    TorchrunArgs,
    count_processes,
    parse_devices,
    parse_plan_fields,
    parse_shown_ranks,
)
from nfold.launch.verdict import AGENT_EXIT_CODES, HANG_TIMEOUT_HINT, Outcome, read_outcome

RUNS_FOLDER = "runs"
SHUTDOWN_TIMEOUT_S = 4  # for a checkpoint, after a rank failed or a request to stop
STOP_GRACE_S = SHUTDOWN_TIMEOUT_S + 2.0  # for the agent, which ends its ranks first
PROCESSES_UNDER_AGENT = 2  # for the verdict: the exit code of the root is not that of a rank
FOLDER_VARIABLE, PLAN_VARIABLE = "NFOLD_FOLDER", "NFOLD_PLAN"


@dataclass(frozen=True, kw_only=True)
class LocalRanks:
    """The ranks of this node: count, device type and plan fields.

    ``cores_per_rank`` is 0 on GPUs, and if there are more ranks than cores.
    """

    processes: int
    device: str
    cores_per_rank: int
    shown_ranks: tuple[int, ...]
    plan: dict[str, Any]

    @classmethod
    def from_args(cls, args: TorchrunArgs, machine: Machine) -> LocalRanks:
        """Return the ranks on ``machine``; raises UsageError and DevicesMissing."""
        fields = parse_plan_fields(args.plan)
        kind, count = parse_devices(args.nproc_per_node, fields)
        device = kind or ("cuda" if machine.gpus else "cpu")
        processes = count_processes(count, device, machine)
        return cls(
            processes=processes,
            device=device,
            cores_per_rank=machine.cores // processes if device == "cpu" else 0,
            shown_ranks=parse_shown_ranks(args.local_ranks_filter, processes),
            plan={"device": kind, **fields} if kind else fields,
        )


def launch_script(
    args: TorchrunArgs,
    ranks: LocalRanks,
    rendezvous: Rendezvous,
    *,
    stop: StopRequest,
    output: BinaryIO,
    remedies: RunRemedies | None = None,
) -> Outcome:
    """Run the script on all ranks to its end, with their output copied to ``output``.

    Every rank applies the ``remedies``. Raises StoreUnusable if the results folder cannot be written.
    """
    folder = HandoffFolder(_new_folder(args))
    facts = {
        "schema": 1,
        "argv": redact_arguments(sys.argv),
        "asked": _serialize_args(args),
        "started_at": _utc_now(),
    }
    _write(folder, facts)
    follower = LogFollower(folder, ranks.shown_ranks, output)
    options = RunOptions(
        results=args.results,
        hang_timeout_s=args.hang_timeout,
        start_timeout_s=args.start_timeout,
        stop=stop,
        on_progress=lambda _: follower.copy(),
    )
    gpus = tuple(range(ranks.processes)) if ranks.device == "cuda" else ()
    GUARDIAN.start()
    try:
        started = _launch(folder, args, ranks, rendezvous, remedies)
        with TelemetrySession(folder, gpus, options) as watched:
            ending = Supervisor(folder, started, watched.options).run()
    finally:
        folder.remove_secrets()
    follower.finish()
    outcome = _outcome(folder, ending)
    cause = outcome.cause and dataclasses.replace(
        outcome.cause, text=redact_text(outcome.cause.text)
    )
    ended = {"ended_at": _utc_now(), "status": outcome.status, "cause": serialize(cause)}
    _write(folder, {**facts, **ended, "exit_code": exit_code(outcome)})
    return outcome


def exit_code(outcome: Outcome) -> int:
    """Return 0 if ok, 1 if failed, 128 + signal after a request to stop."""
    if outcome.status == "interrupted" and outcome.cause and outcome.cause.signal:
        return 128 + outcome.cause.signal
    return 0 if outcome.status == "ok" else 1


def exec_script(args: TorchrunArgs) -> NoReturn:
    """Replace this process by the script, as the rank that the environment names."""
    for option, given in (("--watch", args.watch), ("--with", args.settings is not None)):
        if given:
            raise UsageError(
                f"{option} needs ranks that nfold run starts; next: unset RANK and WORLD_SIZE"
            )
    plan = parse_plan_fields(args.plan)
    if plan:
        os.environ[PLAN_VARIABLE] = json.dumps(plan)
    start = {"script": [sys.executable], "module": [sys.executable, "-m"], "program": []}
    command = [*start[args.kind], args.script, *args.arguments]
    os.execvp(command[0], command)  # noqa: S606  # no shell is wanted


def _launch(
    folder: HandoffFolder,
    args: TorchrunArgs,
    ranks: LocalRanks,
    rendezvous: Rendezvous,
    remedies: RunRemedies | None,
) -> ProcessSpec:
    run = module_command(
        "nfold.launch.script_process", str(folder.path), args.kind, str(ranks.cores_per_rank)
    )
    group = RankGroup(
        processes=ranks.processes,
        command=(*run, args.script, *args.arguments),
        nodes=rendezvous.nodes,
        backend=rendezvous.backend,
        endpoint=rendezvous.endpoint,
        run_id=rendezvous.run_id,
        conf=rendezvous.conf,
        node_rank=rendezvous.node_rank,
        max_restarts=args.max_restarts,
        monitor_interval_s=args.monitor_interval,
        shutdown_timeout_s=SHUTDOWN_TIMEOUT_S,
    )
    return ProcessSpec(
        command=agent_command(folder, group),
        environment=_environment(folder, ranks, rendezvous, watch=args.watch)
        | _remedy_environment(remedies),
        processes=ranks.processes,
        restarts=args.max_restarts > 0 or rendezvous.nodes[1] > rendezvous.nodes[0],
        is_user_script=True,
        stop_grace_s=STOP_GRACE_S,
        reads_stdin=rendezvous.nodes[1] == 1 and sys.stdin is not None,
    )


def _environment(
    folder: HandoffFolder, ranks: LocalRanks, rendezvous: Rendezvous, *, watch: bool
) -> dict[str, str]:
    found = rank_environment(ranks.device, max(1, ranks.cores_per_rank))
    if "OMP_NUM_THREADS" in os.environ:
        del found["OMP_NUM_THREADS"]
    found[FOLDER_VARIABLE] = str(folder.path)
    if ranks.plan:
        found[PLAN_VARIABLE] = json.dumps(ranks.plan)
    if watch:
        found[WATCH_VARIABLE] = "1"
    return {**found, **rendezvous.environment}


def _remedy_environment(remedies: RunRemedies | None) -> dict[str, str]:
    if remedies is None:
        return {}
    found = remedies.variant.environment(os.environ)
    if remedies.variant.threads is not None:
        found["OMP_NUM_THREADS"] = str(remedies.variant.threads)
    return {**found, REMEDIES_VARIABLE: json.dumps(serialize(remedies))}


def _outcome(folder: HandoffFolder, ending: TreeExit) -> Outcome:
    found = read_outcome(folder, ending, PROCESSES_UNDER_AGENT)
    if ending.exit_code == 0:
        # Failures before a restart do not count.
        return dataclasses.replace(found, status="ok", cause=None, failures=(), exit_codes={})
    return found


def describe_detached(detached: Sequence[tuple[int, str]]) -> str:
    """Return the processes that the script left running, and how to end them."""
    named = ", ".join(f"{pid} ({command})" for pid, command in detached)
    pids = " ".join(str(pid) for pid, _ in detached)
    return f"the script left processes running that it had detached: {named}; next: kill {pids}"


def describe_outcome(outcome: Outcome) -> str:
    """Return the message about a failed run: root cause, other ranks, log files."""
    cause = outcome.cause or FailureCause(text="the run ended with no error message")
    own = next((f for f in outcome.failures if f.rank == cause.rank), None)
    lines = [_root_cause(outcome, cause, own)]
    lines += _others(outcome, cause.rank)
    if outcome.leftover_pids:
        lines.append(
            f"  processes {', '.join(map(str, outcome.leftover_pids))} were still there 5 s after SIGKILL"
        )
    log = f"rank-{cause.rank}.log" if cause.rank is not None else "agent.log"
    stacks = ", Python stacks in stack-K.txt" if outcome.status == "hung" else ""
    lines.append(f"  logs: {display_path(outcome.folder)} ({log} first{stacks})")
    if outcome.status == "hung":
        lines.append(f"  {HANG_TIMEOUT_HINT}")
    return "\n".join(lines)


def _root_cause(outcome: Outcome, cause: FailureCause, own: RankFailure | None) -> str:
    if outcome.status == "hung":
        return f"hung: {cause.text}"
    if own is not None and own.text == cause.text:
        return f"rank {cause.rank} {'failed' if own.collateral else 'failed first'}: {cause.text}"
    if cause.rank is None:
        last = _last_line(outcome.folder / "agent.log")
        return f"{cause.text}: {last}" if last else cause.text
    return cause.text


def _others(outcome: Outcome, root: int | None) -> list[str]:
    lines = {f.rank: f"{f.text}{' (collateral)' if f.collateral else ''}" for f in outcome.failures}
    for rank, code in outcome.exit_codes.items():
        if code < 0 and code not in AGENT_EXIT_CODES:
            lines.setdefault(rank, f"ended by {signal.Signals(-code).name}")
        elif code > 0:
            lines.setdefault(rank, f"exited with code {code}")
    return [f"  rank {rank}: {text}" for rank, text in sorted(lines.items()) if rank != root]


def _last_line(file: Path) -> str:
    lines = file.read_text(errors="replace").strip().splitlines() if file.exists() else []
    return lines[-1].strip() if lines else ""


def _new_folder(args: TorchrunArgs) -> Path:
    name = re.sub(r"[^A-Za-z0-9._-]+", "_", Path(args.script).stem)[:40]
    moment = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    return (args.results / RUNS_FOLDER / f"{moment}-{name}-{secrets.token_hex(3)}").absolute()


def _write(folder: HandoffFolder, facts: dict[str, Any]) -> None:
    try:
        folder.write_run_facts(facts)
    except OSError as error:
        raise StoreUnusable(
            f"{folder.path} cannot be written: {error.strerror}; next: --results DIR"
        ) from None


def _serialize_args(args: TorchrunArgs) -> dict[str, Any]:
    redacted = dataclasses.replace(
        args,
        script=abbreviate_home(args.script),
        arguments=redact_arguments(args.arguments),
        rdzv_endpoint=args.rdzv_endpoint and redact_text(args.rdzv_endpoint),
        rdzv_conf=args.rdzv_conf and redact_text(args.rdzv_conf),
    )
    paths = {"results": args.results, "settings": args.settings}
    written = {name: path and abbreviate_home(str(path)) for name, path in paths.items()}
    return {**serialize(redacted), **written}


def _utc_now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


CHUNK_BYTES = 2**20


class LogFollower:
    """Copies new text of the logs of the shown local ranks to ``output``.

    The log of a single rank is copied unchanged; with several, whole lines are copied with
    ``[rank K]`` before each.
    """

    def __init__(self, folder: HandoffFolder, shown: Sequence[int], output: BinaryIO) -> None:
        self._folder = folder
        self._output = output
        self._several = len(shown) > 1
        self._read_bytes = dict.fromkeys(shown, 0)
        self._begun = dict.fromkeys(shown, b"")

    def copy(self) -> None:
        for local_rank in self._read_bytes:
            while text := self._next(local_rank):
                self._output.write(self._lines(local_rank, text) if self._several else text)
        self._output.flush()

    def finish(self) -> None:
        """Copy the remaining text, also of incomplete lines."""
        self.copy()
        for local_rank, begun in self._begun.items():
            if begun:
                self._output.write(self._lines(local_rank, b"\n"))
        self._output.flush()

    def _next(self, local_rank: int) -> bytes:
        try:
            with self._folder.local_rank_log(local_rank).open("rb") as log:
                log.seek(self._read_bytes[local_rank])
                text = log.read(CHUNK_BYTES)
        except FileNotFoundError:
            return b""
        self._read_bytes[local_rank] += len(text)
        return text

    def _lines(self, local_rank: int, text: bytes) -> bytes:
        rank = self._folder.local_rank_log(local_rank).stem.partition("-")[2]
        *whole, self._begun[local_rank] = (self._begun[local_rank] + text).split(b"\n")
        return b"".join(b"[rank %s] %s\n" % (rank.encode(), line) for line in whole)
