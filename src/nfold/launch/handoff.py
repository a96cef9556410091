"""The folder of one measurement: all paths in it and the formats of its files.

    task.json       workload, plan, variant, machine; no secrets
    arguments.json  the script with all arguments, if task.json lacks some; removed at the end
    rank-K.json     samples of rank K, replaced while it runs
    error-K.json    why rank K failed
    seen-K.json     the script profile of rank K
    heartbeat-K     phase, step, monotonic time of rank K; a memory map
    watch-K.json    ``nfold run --watch``: waits of rank K, replaced while it runs
    stack-K.txt     Python stacks of rank K, written on a signal of the supervisor
    rank-K.log      output of rank K
    group.json      the ranks that the agent starts; secrets are removed at the end
    agent.log       output of torchelastic, and of a rank that could not start
    agent.json      exit codes by rank, from torchelastic
    ranks.json      process ids by rank, for the telemetry sampler
    telemetry.csv   written by the sampler
    run.json        ``nfold run``: options and outcome
    local-K.log     ``nfold run`` on several nodes: a link to the log of the K-th rank of this node

No file is a pickle. JSON files are written under a temporary name and renamed.
"""

from __future__ import annotations

import dataclasses
import json
import mmap
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nfold.core.machine import Machine
from nfold.core.measurement import Epoch, RankSamples
from nfold.core.plan import Plan
from nfold.core.process_identity import ProcessIdentity
from nfold.core.redaction import redact_arguments, redact_text
from nfold.core.script_profile import ReplayHints, ScriptProfile
from nfold.core.serialization import VARIANT_KEY, deserialize, replace_file, serialize
from nfold.core.variant import Variant
from nfold.core.workload import Workload
from nfold.engines.base import Phase, Task

HEARTBEAT_FORMAT = struct.Struct("=qqqqqqq")


@dataclass(frozen=True)
class HeartbeatRecord:
    """One rank's last sign of life. ``monotonic_ns`` is the host-wide monotonic clock.

    ``is_inferred``: from optimizer steps and batches of a script that reports nothing itself.
    """

    pid: int
    phase: Phase
    step: int
    total: int
    monotonic_ns: int
    start_ticks: int = 0
    is_inferred: bool = False

    @property
    def identity(self) -> ProcessIdentity:
        return ProcessIdentity(self.pid, self.start_ticks)


@dataclass(frozen=True, kw_only=True)
class RankFailure:
    """Why a rank failed: a measurement status, one sentence and the traceback.

    ``location`` is the line of the user's code, of the error or, if the rank ``has_left`` its training
    loop too early, of that.
    """

    rank: int
    status: str
    text: str
    step: int | None = None
    collateral: bool = False
    monotonic_ns: int = 0
    traceback: str = ""
    peak_memory_bytes: int | None = None
    location: str = ""
    has_left: bool = False


@dataclass(frozen=True)
class RankReports:
    """The reports of ranks in the folder at ``path``: heartbeat, samples, profile and failure."""

    _path: Path

    def heartbeat_file(self, rank: int) -> Path:
        return self._path / f"heartbeat-{rank}"

    def read_heartbeats(self) -> dict[int, HeartbeatRecord]:
        """Return the last heartbeat of each rank of this node, ordered by rank."""
        names = (file.name.partition("-")[2] for file in self._path.glob("heartbeat-*"))
        ranks = sorted(int(name) for name in names if name.isdigit())
        found = {rank: self.read_heartbeat(rank) for rank in ranks}
        return {rank: beat for rank, beat in found.items() if beat is not None}

    def read_heartbeat(self, rank: int) -> HeartbeatRecord | None:
        """Return the last heartbeat of a rank, None before its first."""
        try:
            raw = self.heartbeat_file(rank).read_bytes()
        except FileNotFoundError:
            return None
        if len(raw) != HEARTBEAT_FORMAT.size:
            return None
        pid, phase, step, total, at, start_ticks, inferred = HEARTBEAT_FORMAT.unpack(raw)
        return HeartbeatRecord(pid, Phase(phase), step, total, at, start_ticks, bool(inferred))

    def write_samples(self, samples: RankSamples) -> None:
        write_json(self._path / f"rank-{samples.rank}.json", serialize(samples))

    def read_samples(self) -> tuple[RankSamples, ...]:
        """Return the samples that the ranks have written so far, ordered by rank."""
        found = [deserialize(RankSamples, value) for value in self._read_all("rank-*.json")]
        return tuple(sorted(found, key=lambda samples: samples.rank))

    def samples_mtime_ns(self) -> int:
        """Return when rank 0 last wrote its samples, 0 before."""
        try:
            return (self._path / "rank-0.json").stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    def read_epochs(self) -> tuple[Epoch, ...]:
        """Return the epochs that rank 0 has finished."""
        try:
            samples = json.loads((self._path / "rank-0.json").read_text())
        except FileNotFoundError:
            return ()
        return tuple(deserialize(Epoch, epoch) for epoch in samples["epochs"])

    def write_profile(self, seen: ScriptProfile) -> None:
        write_json(self._path / f"seen-{seen.rank}.json", serialize(seen))

    def read_profiles(self) -> tuple[ScriptProfile, ...]:
        """Return the script profiles ordered by rank.

        Empty if none is written yet, or if another version of nfold wrote them: then the script
        needs another probe run.
        """
        try:
            found = [deserialize(ScriptProfile, value) for value in self._read_all("seen-*.json")]
        except ValueError:
            return ()
        return tuple(sorted(found, key=lambda seen: seen.rank))

    def write_failure(self, failure: RankFailure) -> None:
        public = dataclasses.replace(failure, text=redact_text(failure.text))
        write_json(self._path / f"error-{failure.rank}.json", serialize(public))

    def read_failures(self) -> list[RankFailure]:
        """Return the failures of all ranks, the earliest first."""
        found = [deserialize(RankFailure, value) for value in self._read_all("error-*.json")]
        return sorted(found, key=lambda failure: failure.monotonic_ns)

    def _read_all(self, pattern: str) -> list[Any]:
        return [json.loads(file.read_text()) for file in sorted(self._path.glob(pattern))]


class AgentFiles:
    """The files between the supervisor and the agent in the folder at ``path``: ranks and exits."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._group_file = path / "group.json"
        self.rank_pids_file = path / "ranks.json"

    def write_group(self, group: Any) -> None:
        """Write the ``RankGroup`` that the agent starts."""
        write_json(self._group_file, serialize(group), private=True)

    def read_group(self) -> Any:
        return json.loads(self._group_file.read_text())

    def redact_group(self) -> None:
        """Remove secrets from the command of the group, if the agent was given one."""
        if self._group_file.exists():
            group = self.read_group()
            command = list(redact_arguments(group["command"]))
            write_json(self._group_file, {**group, "command": command})

    def write_exit_codes(self, exits: dict[int, int]) -> None:
        """Write the exit codes that torchelastic reports by rank, negative for signals."""
        write_json(self._path / "agent.json", serialize(exits))

    def read_exit_codes(self) -> dict[int, int]:
        """Return the exit codes by rank; empty if the agent wrote none."""
        file = self._path / "agent.json"
        if not file.exists():
            return {}
        return {int(rank): code for rank, code in json.loads(file.read_text()).items()}

    def write_rank_pids(self, pids: dict[int, int]) -> None:
        """Write the process ids of the ranks for the telemetry sampler."""
        write_json(self.rank_pids_file, serialize(pids))


class SliceFiles:
    """The files by which a run that alternates with another one waits, in the folder at ``path``."""

    def __init__(self, path: Path) -> None:
        self._done, self._allowed = path / "slices.json", path / "allowed-slices.json"

    def write_done(self, count: int) -> None:
        """Note that the ranks wait after so many slices."""
        write_json(self._done, count)

    def read_done(self) -> int | None:
        """Return after how many slices the ranks wait, or have waited last; None before they wait."""
        return json.loads(self._done.read_text()) if self._done.exists() else None

    def allow(self, count: int) -> None:
        """Let the ranks make so many slices in all."""
        write_json(self._allowed, count)

    def read_allowed(self) -> int:
        return json.loads(self._allowed.read_text()) if self._allowed.exists() else 0


class HandoffFolder:
    """The folder of one measurement at ``path``.

    ``reports`` are the files of ranks, ``agent`` those of the agent that starts them, ``slices`` those of
    a run that alternates with another one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.telemetry_csv = path / "telemetry.csv"
        self.agent_log = path / "agent.log"
        self.sandbox = path / "scratch"
        self.reports = RankReports(path)
        self.agent = AgentFiles(path)
        self.slices = SliceFiles(path)
        self._arguments_file = path / "arguments.json"

    def rank_log(self, rank: int) -> Path:
        return self.path / f"rank-{rank}.log"

    def local_rank_log(self, local_rank: int) -> Path:
        """Return the log of the K-th rank of this node; its link is missing if the ranks agree."""
        link = self.path / f"local-{local_rank}.log"
        return link.resolve() if link.exists() else self.rank_log(local_rank)

    def reset_rank(self, rank: int, local_rank: int) -> None:
        """Delete files of attempts before a restart: of this rank, and of ranks that have ended."""
        (self.path / f"error-{rank}.json").unlink(missing_ok=True)
        self.reports.heartbeat_file(rank).unlink(missing_ok=True)
        if local_rank == 0:
            gone = [
                other
                for other, beat in self.reports.read_heartbeats().items()
                if not beat.identity.is_running
            ]
            for other in gone:
                self.reports.heartbeat_file(other).unlink(missing_ok=True)
        if local_rank != rank:
            link = self.path / f"local-{local_rank}.log"
            link.unlink(missing_ok=True)
            link.symlink_to(self.rank_log(rank).name)

    def stack_file(self, rank: int) -> Path:
        return self.path / f"stack-{rank}.txt"

    def watch_file(self, rank: int) -> Path:
        return self.path / f"watch-{rank}.json"

    def write_task(self, task: Task) -> None:
        """Write the task that every rank reads first; creates the folder."""
        public = task.workload.redact()
        if public.script != task.workload.script:
            write_json(self._arguments_file, list(task.workload.script), private=True)
        stored = {
            "workload": serialize(public),
            "plan": task.plan.to_dict(),
            VARIANT_KEY: None
            if task.requested_variant is None
            else task.requested_variant.to_dict(),
            "machine": serialize(task.machine),
            "checkpoint": task.checkpoint,
            "checkpoint_every": task.checkpoint_every,
            "turns": [variant.to_dict() for variant in task.interleaved_variants],
            "learnt": serialize(task.replay_hints),
            "edited_sources": [*task.edited_sources],
            "alternates": task.alternates,
        }
        write_json(self.path / "task.json", stored)

    def has_task(self) -> bool:
        return (self.path / "task.json").exists()

    def read_task(self, *, rank: int, local_rank: int, world_size: int) -> Task:
        """Return the task of one rank."""
        stored = json.loads((self.path / "task.json").read_text())
        variant = stored[VARIANT_KEY]
        workload = deserialize(Workload, stored["workload"])
        if self._arguments_file.exists():
            script = tuple(json.loads(self._arguments_file.read_text()))
            workload = dataclasses.replace(workload, script=script)
        return Task(
            workload=workload,
            plan=Plan.from_dict(stored["plan"]),
            requested_variant=None if variant is None else Variant.from_dict(variant),
            machine=deserialize(Machine, stored["machine"]),
            rank=rank,
            local_rank=local_rank,
            world_size=world_size,
            checkpoint=stored["checkpoint"],
            checkpoint_every=stored["checkpoint_every"],
            interleaved_variants=tuple(map(Variant.from_dict, stored["turns"])),
            replay_hints=deserialize(ReplayHints, stored["learnt"]),
            edited_sources=tuple(tuple(pair) for pair in stored["edited_sources"]),
            alternates=stored["alternates"],
        )

    def remove_secrets(self) -> None:
        """Remove from the folder what ranks need and nobody may read after the run."""
        self._arguments_file.unlink(missing_ok=True)
        self.agent.redact_group()

    def write_run_facts(self, facts: dict[str, Any]) -> None:
        """Write run.json; creates the folder."""
        write_json(self.path / "run.json", facts)


class HeartbeatWriter:
    """Writes the heartbeat of one rank: about a microsecond each, no system call.

    Each field is stored as one aligned word: a reader never sees half a number.
    (``struct.pack_into`` clears the whole record first: a reader saw a heartbeat at time 0.)
    """

    def __init__(self, file: Path, pid: int, *, is_inferred: bool = False) -> None:
        with replace_file(file) as temporary:
            temporary.write_bytes(bytes(HEARTBEAT_FORMAT.size))
            self._file = temporary.open("r+b")
            self._map = mmap.mmap(self._file.fileno(), HEARTBEAT_FORMAT.size)
            self._fields = memoryview(self._map).cast("q")
            identity = ProcessIdentity.of(pid)
            self._fields[0] = pid
            self._fields[5] = 0 if identity is None else identity.start_ticks
            self._fields[6] = is_inferred
            self.beat(Phase.STARTING, 0, 0, time.monotonic_ns())

    def beat(self, phase: Phase, step: int, total: int, monotonic_ns: int) -> None:
        self._fields[1] = phase
        self._fields[2] = step
        self._fields[3] = total
        self._fields[4] = monotonic_ns

    def close(self) -> None:
        self._fields.release()
        self._map.close()
        self._file.close()


def write_json(file: Path, value: Any, *, private: bool = False) -> None:
    """Replace ``file`` by JSON. A ``private`` file has mode 0600.

    Creates the folder: somebody may have removed it during the run.
    """
    with replace_file(file) as temporary:
        temporary.touch(0o600 if private else 0o666)
        temporary.write_text(json.dumps(value))
