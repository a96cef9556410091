"""The parent's side of ``nfold run``: start a script's ranks, follow them, say what became of them.

results/runs/<time-name-random>/
run.json        what was asked for and, later, how it ended
rank-K.log      what rank K printed
error-K.json    why rank K failed
agent.log       what torchelastic printed
telemetry.csv   devices and host over time
"""

from __future__ import annotations

import datetime
import json
import os
import re
import secrets
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from nfold.errors import StoreUnusable
from nfold.machine import Machine
from nfold.measurement import Cause, Status
from nfold.place import shown_path
from nfold.plain import to_plain
from nfold.run.asked import Asked, Rendezvous, place_of, plan_of, processes_of, shown_of
from nfold.run.follow import Follower
from nfold.run.handoff import Failure, Folder
from nfold.run.options import Options, Stop
from nfold.run.processes import LOOPBACK, Group, Launch, by_agent, python, rank_environment
from nfold.run.supervise import Ending, Supervisor
from nfold.run.verdict import ENDED_BY_AGENT, OWN_WORK, verdict
from nfold.run.watching import Telemetry

RUNS = "runs"
SHUTDOWN_TIMEOUT_S = 4
"""How long ranks may go on after one failed or a request to stop came: time for a checkpoint."""
STOP_GRACE_S = SHUTDOWN_TIMEOUT_S + 2.0
"""How long a request to stop waits for the agent, which ends its ranks first."""
BY_AGENT = 2
"""For the verdict: there is an agent, even over one rank; the root's exit code is not a rank's."""
FOLDER, PLAN = "NFOLD_FOLDER", "NFOLD_PLAN"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a script: its status, the root cause, and what else is to be told."""

    status: Status
    cause: Cause | None
    failures: tuple[Failure, ...]
    exits: Mapping[int, int]
    left: tuple[int, ...]
    folder: Path


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The ranks of this node: how many, on which kind of device, under which plan fields."""

    processes: int
    device: str
    cores: int
    """Of one CPU device; 0 on GPUs, and where there are more ranks than cores."""
    shown: tuple[int, ...]
    plan: dict[str, Any]

    @classmethod
    def of(cls, asked: Asked, machine: Machine) -> Ranks:
        """What ``asked`` means on ``machine``; raises UsageError and DevicesMissing."""
        fields = plan_of(asked.plan)
        kind, count = place_of(asked.nproc_per_node, fields)
        device = kind or ("cuda" if machine.gpus else "cpu")
        processes = processes_of(count, device, machine)
        return cls(
            processes=processes,
            device=device,
            cores=machine.cores // processes if device == "cpu" else 0,
            shown=shown_of(asked.local_ranks_filter, processes),
            plan={"device": kind, **fields} if kind else fields,
        )


def launch(
    asked: Asked, ranks: Ranks, meeting: Rendezvous, *, stop: Stop, output: BinaryIO
) -> Outcome:
    """Run the script on all ranks to its end, their output to ``output``; nothing is left after.

    Raises StoreUnusable where the results folder cannot be written.
    """
    folder = Folder(_new_folder(asked))
    facts = {"schema": 1, "argv": sys.argv, "asked": _said(asked), "started_at": _now()}
    _write(folder, facts)
    follower = Follower(folder, ranks.shown, output)
    options = Options(
        results=asked.results,
        hang_timeout_s=asked.hang_timeout,
        stop=stop,
        watch=lambda _: follower.copy(),
    )
    started = _launch(folder, asked, ranks, meeting)
    gpus = tuple(range(ranks.processes)) if ranks.device == "cuda" else ()
    with Telemetry(folder, gpus, options) as watched:
        ending = Supervisor(folder, started, watched.options).run()
    follower.finish()
    outcome = _outcome(folder, ending)
    ended = {"ended_at": _now(), "status": outcome.status, "cause": to_plain(outcome.cause)}
    _write(folder, {**facts, **ended, "exit_code": exit_code(outcome)})
    return outcome


def exit_code(outcome: Outcome) -> int:
    """0 ok, 1 failed, 128 + signal where nfold was asked to stop."""
    if outcome.status == "interrupted" and outcome.cause and outcome.cause.signal:
        return 128 + outcome.cause.signal
    return 0 if outcome.status == "ok" else 1


def attach(asked: Asked) -> NoReturn:
    """Become the script, as the rank that the environment names; launch nothing."""
    plan = plan_of(asked.plan)
    if plan:
        os.environ[PLAN] = json.dumps(plan)
    start = {"script": [sys.executable], "module": [sys.executable, "-m"], "program": []}
    command = [*start[asked.kind], asked.script, *asked.arguments]
    os.execvp(command[0], command)  # noqa: S606  # no shell is wanted


def _launch(folder: Folder, asked: Asked, ranks: Ranks, meeting: Rendezvous) -> Launch:
    run = python("nfold.run.script", str(folder.path), asked.kind, str(ranks.cores))
    group = Group(
        processes=ranks.processes,
        command=(*run, asked.script, *asked.arguments),
        nodes=meeting.nodes,
        backend=meeting.backend,
        endpoint=meeting.endpoint,
        run_id=meeting.run_id,
        conf=meeting.conf,
        node_rank=meeting.node_rank,
        max_restarts=asked.max_restarts,
        monitor_interval_s=asked.monitor_interval,
        shutdown_timeout_s=SHUTDOWN_TIMEOUT_S,
    )
    return Launch(
        command=by_agent(folder, group),
        environment=_environment(folder, ranks, alone=meeting.nodes[1] == 1),
        processes=ranks.processes,
        restarts=asked.max_restarts > 0 or meeting.nodes[1] > meeting.nodes[0],
        own_script=True,
        stop_grace_s=STOP_GRACE_S,
        mark=FOLDER,
    )


def _environment(folder: Folder, ranks: Ranks, *, alone: bool) -> dict[str, str]:
    """As in a measurement, but for threads that the user's own environment sets."""
    found = rank_environment(ranks.device, max(1, ranks.cores))
    if "OMP_NUM_THREADS" in os.environ:
        del found["OMP_NUM_THREADS"]
    found[FOLDER] = str(folder.path)
    if ranks.plan:
        found[PLAN] = json.dumps(ranks.plan)
    return {**found, **(LOOPBACK if alone else {})}


def _outcome(folder: Folder, ending: Ending) -> Outcome:
    failures, exits = folder.read_failures(), folder.read_exits()
    status, cause = verdict(ending, failures, exits, measured=0, processes=BY_AGENT)
    if ending.exit_code == 0:
        # What failed before a restart is no failure of the run.
        status, cause, failures, exits = "ok", None, [], {}
    return Outcome(
        status=status,
        cause=cause,
        failures=tuple(failures),
        exits=exits,
        left=ending.left,
        folder=folder.path,
    )


def told(outcome: Outcome) -> str:
    """What a person reads of a failed run: the root cause, the other ranks, where to look."""
    cause = outcome.cause or Cause(text="it ended without a word")
    own = next((f for f in outcome.failures if f.rank == cause.rank), None)
    lines = [_root_cause(outcome, cause, own)]
    lines += _others(outcome, cause.rank)
    if outcome.left:
        lines.append(f"  processes {', '.join(map(str, outcome.left))} outlived SIGKILL by 5 s")
    log = f"rank-{cause.rank}.log" if cause.rank is not None else "agent.log"
    stacks = ", Python stacks in stack-K.txt" if outcome.status == "hung" else ""
    lines.append(f"  logs: {shown_path(outcome.folder)} ({log} first{stacks})")
    if outcome.status == "hung":
        lines.append(f"  {OWN_WORK}")
    return "\n".join(lines)


def _root_cause(outcome: Outcome, cause: Cause, own: Failure | None) -> str:
    if outcome.status == "hung":
        return f"hung: {cause.text}"
    if own is not None and own.text == cause.text:
        return f"rank {cause.rank} {'failed' if own.collateral else 'failed first'}: {cause.text}"
    if cause.rank is None:
        last = _last_line(outcome.folder / "agent.log")
        return f"{cause.text}: {last}" if last else cause.text
    return cause.text


def _others(outcome: Outcome, root: int | None) -> list[str]:
    """A line for every other rank that failed; those that the agent stopped did not."""
    lines = {f.rank: f"{f.text}{' (collateral)' if f.collateral else ''}" for f in outcome.failures}
    for rank, code in outcome.exits.items():
        if code < 0 and code not in ENDED_BY_AGENT:
            lines.setdefault(rank, f"ended by {signal.Signals(-code).name}")
        elif code > 0:
            lines.setdefault(rank, f"exited with {code}")
    return [f"  rank {rank}: {text}" for rank, text in sorted(lines.items()) if rank != root]


def _last_line(file: Path) -> str:
    lines = file.read_text(errors="replace").strip().splitlines() if file.exists() else []
    return lines[-1].strip() if lines else ""


def _new_folder(asked: Asked) -> Path:
    """Absolute, because a script may change its working directory."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "_", Path(asked.script).stem)[:40]
    moment = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    return (asked.results / RUNS / f"{moment}-{name}-{secrets.token_hex(3)}").absolute()


def _write(folder: Folder, facts: dict[str, Any]) -> None:
    try:
        folder.write_run(facts)
    except OSError as error:
        raise StoreUnusable(
            f"{folder.path} cannot be written: {error.strerror}; next: --results DIR"
        ) from None


def _said(asked: Asked) -> dict[str, Any]:
    return {**to_plain(asked), "results": str(asked.results)}


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
