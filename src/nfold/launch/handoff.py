"""The folder of one measurement: the one owner of every path in it, and of how it is written.

    task.json       in: workload, plan, ablation, machine; no secrets
    arguments.json  in: the script with all arguments, if task.json lacks some; removed at the end
    rank-K.json     out: what rank K measured, also while it runs; written aside and renamed
    error-K.json    out: why rank K failed
    seen-K.json     out: what was seen of a script that rank K ran
    heartbeat-K     out: phase, step, monotonic time, a few times a step at most; a memory map
    stack-K.txt     out: Python stacks of rank K, when the supervisor asks for them
    rank-K.log      out: whatever rank K printed
    group.json      in: what the agent starts; secrets are removed at the end
    agent.log       out: whatever torchelastic and a rank that could not start printed
    agent.json      out: exit codes by rank, from torchelastic
    ranks.json      process ids by rank, for the telemetry sampler
    telemetry.csv   out: from the sampler
    run.json        of ``nfold run``: what was asked for, and how it ended
    local-K.log     of ``nfold run`` on several nodes: a link to the log of this node's K-th rank

Nothing here is a pickle, and nothing is read from a file that is still being written.
"""

from __future__ import annotations

import dataclasses
import json
import mmap
import os
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
from nfold.core.serialization import deserialize, serialize
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
    """Why a rank failed: a status of a measurement, one sentence, and the traceback."""

    rank: int
    status: str
    text: str
    step: int | None = None
    collateral: bool = False
    monotonic_ns: int = 0
    traceback: str = ""
    peak_memory_bytes: int | None = None


class HandoffFolder:
    """The hand-over folder of one measurement at ``path``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.telemetry_csv = path / "telemetry.csv"
        self.ranks_file = path / "ranks.json"
        self.agent_log = path / "agent.log"
        self._group_file = path / "group.json"
        self._arguments_file = path / "arguments.json"

    def rank_log(self, rank: int) -> Path:
        """Where a rank's output goes."""
        return self.path / f"rank-{rank}.log"

    def local_rank_log(self, local_rank: int) -> Path:
        """The log of this node's K-th rank; on the first node, ranks are named alike."""
        link = self.path / f"local-{local_rank}.log"
        return link.resolve() if link.exists() else self.rank_log(local_rank)

    def reset_rank(self, rank: int, local_rank: int) -> None:
        """Clear what attempts before a restart left of this rank and of ranks that are no more."""
        (self.path / f"error-{rank}.json").unlink(missing_ok=True)
        self.heartbeat_file(rank).unlink(missing_ok=True)
        if local_rank == 0:
            gone = [
                other
                for other, beat in self.read_heartbeats().items()
                if not beat.identity.is_running
            ]
            for other in gone:
                self.heartbeat_file(other).unlink(missing_ok=True)
        if local_rank != rank:
            link = self.path / f"local-{local_rank}.log"
            link.unlink(missing_ok=True)
            link.symlink_to(self.rank_log(rank).name)

    def stack_file(self, rank: int) -> Path:
        """Where a rank's Python stacks go."""
        return self.path / f"stack-{rank}.txt"

    def heartbeat_file(self, rank: int) -> Path:
        """A rank's heartbeat map."""
        return self.path / f"heartbeat-{rank}"

    def write_task(self, task: Task) -> None:
        """Write what every rank reads first; creates the folder."""
        public = task.workload.redact()
        if public.script != task.workload.script:
            write_json(self._arguments_file, list(task.workload.script), private=True)
        asked = {
            "workload": serialize(public),
            "plan": task.plan.to_dict(),
            "ablation": None
            if task.requested_variant is None
            else task.requested_variant.to_dict(),
            "machine": serialize(task.machine),
            "checkpoint": task.checkpoint,
            "checkpoint_every": task.checkpoint_every,
            "turns": [turn.to_dict() for turn in task.interleaved_variants],
            "learnt": serialize(task.replay_hints),
        }
        write_json(self.path / "task.json", asked)

    def has_task(self) -> bool:
        """Whether the task has been written."""
        return (self.path / "task.json").exists()

    def read_task(self, *, rank: int, local_rank: int, world_size: int) -> Task:
        """The task as one rank sees it."""
        asked = json.loads((self.path / "task.json").read_text())
        ablation = asked["ablation"]
        workload = deserialize(Workload, asked["workload"])
        if self._arguments_file.exists():
            script = tuple(json.loads(self._arguments_file.read_text()))
            workload = dataclasses.replace(workload, script=script)
        return Task(
            workload=workload,
            plan=Plan.from_dict(asked["plan"]),
            requested_variant=None if ablation is None else Variant.from_dict(ablation),
            machine=deserialize(Machine, asked["machine"]),
            rank=rank,
            local_rank=local_rank,
            world_size=world_size,
            checkpoint=asked["checkpoint"],
            checkpoint_every=asked["checkpoint_every"],
            interleaved_variants=tuple(map(Variant.from_dict, asked["turns"])),
            replay_hints=deserialize(ReplayHints, asked["learnt"]),
        )

    def write_samples(self, samples: RankSamples) -> None:
        """Replace what a rank has measured so far."""
        write_json(self.path / f"rank-{samples.rank}.json", serialize(samples))

    def read_samples(self) -> tuple[RankSamples, ...]:
        """What every rank has measured, as far as it came, ordered by rank."""
        found = [deserialize(RankSamples, value) for value in self._read_all("rank-*.json")]
        return tuple(sorted(found, key=lambda samples: samples.rank))

    def write_profile(self, seen: ScriptProfile) -> None:
        """Keep what one rank saw of a script."""
        write_json(self.path / f"seen-{seen.rank}.json", serialize(seen))

    def read_profiles(self) -> tuple[ScriptProfile, ...]:
        """What every rank saw of a script, ordered by rank; empty where none came so far, or where
        another version of nfold wrote what this one does not know: the script is looked at anew.
        """
        try:
            found = [deserialize(ScriptProfile, value) for value in self._read_all("seen-*.json")]
        except ValueError:
            return ()
        return tuple(sorted(found, key=lambda seen: seen.rank))

    def samples_mtime_ns(self) -> int:
        """When rank 0 last wrote what it measured, 0 before it did."""
        try:
            return (self.path / "rank-0.json").stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    def read_epochs(self) -> tuple[Epoch, ...]:
        """The epochs that rank 0 has finished, without the rest of its samples."""
        try:
            samples = json.loads((self.path / "rank-0.json").read_text())
        except FileNotFoundError:
            return ()
        return tuple(deserialize(Epoch, epoch) for epoch in samples["epochs"])

    def write_failure(self, failure: RankFailure) -> None:
        """Leave word of why a rank failed."""
        public = dataclasses.replace(failure, text=redact_text(failure.text))
        write_json(self.path / f"error-{failure.rank}.json", serialize(public))

    def read_failures(self) -> list[RankFailure]:
        """Every rank's failure, the earliest first."""
        found = [deserialize(RankFailure, value) for value in self._read_all("error-*.json")]
        return sorted(found, key=lambda failure: failure.monotonic_ns)

    def write_group(self, group: Any) -> None:
        """Leave word for the agent of what it starts (a ``Group``)."""
        write_json(self._group_file, serialize(group), private=True)

    def read_group(self) -> Any:
        """What ``write_group`` wrote, as plain values."""
        return json.loads(self._group_file.read_text())

    def remove_secrets(self) -> None:
        """Remove from the folder what ranks need and nobody may read after the run."""
        self._arguments_file.unlink(missing_ok=True)
        if self._group_file.exists():
            group = self.read_group()
            write_json(
                self._group_file, {**group, "command": list(redact_arguments(group["command"]))}
            )

    def write_exit_codes(self, exits: dict[int, int]) -> None:
        """Exit codes by rank, negative for signals, as torchelastic saw them."""
        write_json(self.path / "agent.json", serialize(exits))

    def read_exit_codes(self) -> dict[int, int]:
        """What ``write_exits`` wrote, or nothing where the agent wrote nothing."""
        file = self.path / "agent.json"
        if not file.exists():
            return {}
        return {int(rank): code for rank, code in json.loads(file.read_text()).items()}

    def write_rank_pids(self, pids: dict[int, int]) -> None:
        """Tell the telemetry sampler which processes are the ranks."""
        write_json(self.ranks_file, serialize(pids))

    def read_heartbeats(self) -> dict[int, HeartbeatRecord]:
        """The last beat of every rank of this node that has beaten, ordered by rank."""
        names = (file.name.partition("-")[2] for file in self.path.glob("heartbeat-*"))
        ranks = sorted(int(name) for name in names if name.isdigit())
        found = {rank: self.read_heartbeat(rank) for rank in ranks}
        return {rank: beat for rank, beat in found.items() if beat is not None}

    def read_heartbeat(self, rank: int) -> HeartbeatRecord | None:
        """A rank's last beat, or None before its first."""
        try:
            raw = self.heartbeat_file(rank).read_bytes()
        except FileNotFoundError:
            return None
        if len(raw) != HEARTBEAT_FORMAT.size:
            return None
        pid, phase, step, total, at, start_ticks, inferred = HEARTBEAT_FORMAT.unpack(raw)
        return HeartbeatRecord(pid, Phase(phase), step, total, at, start_ticks, bool(inferred))

    def write_run_facts(self, facts: dict[str, Any]) -> None:
        """Write what a run of a user's script is; creates the folder."""
        write_json(self.path / "run.json", facts)

    def _read_all(self, pattern: str) -> list[Any]:
        return [json.loads(file.read_text()) for file in sorted(self.path.glob(pattern))]


class HeartbeatWriter:
    """Writes one rank's heartbeat: about a microsecond a beat, no system call.

    Every field is a store of one aligned word, so that a reader never sees half a number.
    (``struct.pack_into`` clears the whole record first: a reader saw a beat at time 0.)
    """

    def __init__(self, file: Path, pid: int, *, is_inferred: bool = False) -> None:
        aside = file.with_suffix(".new")
        aside.write_bytes(bytes(HEARTBEAT_FORMAT.size))
        self._file = aside.open("r+b")
        self._map = mmap.mmap(self._file.fileno(), HEARTBEAT_FORMAT.size)
        self._fields = memoryview(self._map).cast("q")
        identity = ProcessIdentity.of(pid)
        self._fields[0] = pid
        self._fields[5] = 0 if identity is None else identity.start_ticks
        self._fields[6] = is_inferred
        self.beat(Phase.STARTING, 0, 0, time.monotonic_ns())
        aside.rename(file)

    def beat(self, phase: Phase, step: int, total: int, monotonic_ns: int) -> None:
        """Put down a new sign of life."""
        self._fields[1] = phase
        self._fields[2] = step
        self._fields[3] = total
        self._fields[4] = monotonic_ns

    def close(self) -> None:
        """Let go of the map; the file stays."""
        self._fields.release()
        self._map.close()
        self._file.close()


def write_json(file: Path, value: Any, *, private: bool = False) -> None:
    """Write JSON to a temporary file beside ``file`` and rename it, so that readers see all of it.

    Creates the folder: somebody may have removed it during the run. A ``private`` file has mode
    0600.
    """
    aside = file.with_name(f".{file.name}.{os.getpid()}")
    mode = 0o600 if private else 0o666
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(aside, "w", opener=lambda path, flags: os.open(path, flags, mode)) as out:
        out.write(json.dumps(value))
    aside.rename(file)
