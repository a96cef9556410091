"""The driver's side of taking turns: arms as groups of rank processes that answer in JSON lines."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ERROR = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Exit|Interrupt|Missing|OutOfMemory)\b")
GRACE_S = 10.0
"""How long ranks may take to end by themselves."""
Answer = dict[str, Any]


class ArmFailed(Exception):
    """An arm has ended or does not answer; says why."""


@dataclass(frozen=True)
class Kind:
    """How an arm's script is run: over all devices by one process, by one each, or on one."""

    script: str
    processes: str


KINDS = {
    "plain": Kind("plain.py", "one device"),
    "dataparallel": Kind("dataparallel.py", "one process"),
    "careful": Kind("careful.py", "one each"),
    "resident": Kind("resident.py", "one each"),
    "prototype": Kind("prototype.py", "one each"),
    "lightning": Kind("lightning_arm.py", "one each"),
    "accelerate": Kind("accelerate_arm.py", "one each"),
    "jax": Kind("jax_arm.py", "one device"),
    "nfold": Kind("nfold_arm.py", "one each"),
    "ablated": Kind("ablated_arm.py", "one each"),
}


@dataclass(frozen=True)
class Spec:
    """An arm as it is asked for: ``KIND`` or ``KIND:NAME=VALUE,...``, which is its name as well."""

    name: str
    kind: str
    fields: tuple[tuple[str, str], ...]

    @classmethod
    def parse(cls, text: str) -> Spec:
        """The arm that ``text`` writes; raises ValueError where it writes none."""
        kind, _, rest = text.partition(":")
        pairs = [part.partition("=") for part in rest.split(",")] if rest else []
        if kind not in KINDS or not all(name and value for name, _, value in pairs):
            allowed = ", ".join(KINDS)
            raise ValueError(f"arm {text!r} is not KIND[:NAME=VALUE,...]; kinds are {allowed}")
        return cls(text, kind, tuple((name, value) for name, _, value in pairs))

    def processes(self, devices: int) -> int:
        """How many ranks the arm has on so many devices."""
        return devices if KINDS[self.kind].processes == "one each" else 1

    def driven(self, devices: int) -> int:
        """How many of the devices the arm uses in all."""
        return 1 if KINDS[self.kind].processes == "one device" else devices


@dataclass(frozen=True, kw_only=True)
class Work:
    """What all arms of a run are to do; ``batch`` is a device's, or with ``whole`` all devices'."""

    workload: str
    batch: int
    whole: bool = False
    device: str = "cuda"
    devices: int = 1
    warmup: int = 30

    def batch_of(self, spec: Spec) -> int:
        """Samples in one step of an arm."""
        return self.batch if self.whole else self.batch * spec.driven(self.devices)


@dataclass(frozen=True, kw_only=True)
class Place:
    """The cores that an arm's ranks and their workers share, and the GPUs that they see."""

    cores: frozenset[int]
    gpus: tuple[int, ...] = ()

    def environment(self) -> dict[str, str]:
        """CUDA_VISIBLE_DEVICES, of those that this process sees itself."""
        seen = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = seen.split(",") if seen else list(map(str, range(max(self.gpus, default=0) + 1)))
        return {"CUDA_VISIBLE_DEVICES": ",".join(names[gpu] for gpu in self.gpus)}


@contextlib.contextmanager
def kept_to(place: Place | None) -> Iterator[None]:
    """What this thread starts meanwhile runs on the place's cores."""
    if place is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, place.cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@dataclass
class Arm:
    """The running ranks of one arm; whatever ends one of them ends the arm."""

    spec: Spec
    work: Work
    logs: Path
    place: Place | None = None
    ready: list[Answer] = field(default_factory=list)
    error: str | None = None
    ranks: list[subprocess.Popen[str]] = field(default_factory=list)
    _lines: queue.Queue[tuple[int, str]] = field(default_factory=queue.Queue)

    def start(self) -> None:
        """Start the ranks, from the main thread: they die with the thread that started them."""
        world, port = self.spec.processes(self.work.devices), free_port()
        seen = self.place.environment() if self.place else {}
        for rank in range(world):
            with self.log(rank).open("w") as log, kept_to(self.place):
                process = subprocess.Popen(
                    self._command(),
                    env=_environment(rank, world, port) | seen,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    start_new_session=True,
                )
            self.ranks.append(process)
            threading.Thread(target=self._read, args=(rank, process), daemon=True).start()

    def log(self, rank: int) -> Path:
        """What a rank prints besides its answers."""
        name = re.sub(r"[^A-Za-z0-9]+", "-", self.spec.name)
        return self.logs / f"{name}-{self.work.devices}-rank{rank}.log"

    def _command(self) -> list[str]:
        spec, work = self.spec, self.work
        driven = spec.driven(work.devices) // spec.processes(work.devices)
        said = {
            "workload": work.workload,
            "batch": work.batch_of(spec),
            "device": work.device,
            "devices": driven,
            "warmup": work.warmup,
        }
        options = [f"--{name}={value}" for name, value in said.items()]
        options += [f"--field={name}={value}" for name, value in spec.fields]
        return [sys.executable, str(HERE / KINDS[spec.kind].script), *options]

    def _read(self, rank: int, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._lines.put((rank, line))

    def ask(self, command: dict[str, Any]) -> None:
        """Send a command to every rank; a rank that is gone is noticed when it does not answer."""
        for process in self.ranks:
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                process.stdin.write(json.dumps(command) + "\n")
                process.stdin.flush()

    def answers(self, deadline: float) -> list[Answer]:
        """One answer of every rank, before ``deadline`` (monotonic); raises ArmFailed."""
        found: dict[int, Answer] = {}
        while len(found) < len(self.ranks):
            try:
                rank, line = self._lines.get(timeout=0.1)
            except queue.Empty:
                self._check(deadline)
            else:
                found[rank] = json.loads(line)
        return [found[rank] for rank in range(len(self.ranks))]

    def _check(self, deadline: float) -> None:
        """A rank that printed its last answer and ended is caught one look later: none is lost."""
        gone = [rank for rank, process in enumerate(self.ranks) if process.poll() is not None]
        if gone and self._lines.empty():
            raise ArmFailed(told(self.log(gone[0]), self.ranks[gone[0]].returncode))
        if time.monotonic() > deadline:
            raise ArmFailed("no answer in time")

    def fail(self, error: ArmFailed) -> None:
        """Keep why the arm failed, and end it."""
        self.error = str(error)
        self.kill()

    def stop(self, deadline: float) -> None:
        """Wait for ranks that were told to stop, then kill what is left; forget empty logs."""
        for process in self.ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        self.kill()
        for rank in range(len(self.ranks)):
            if not self.log(rank).stat().st_size:
                self.log(rank).unlink()

    def kill(self) -> None:
        """End the ranks and whatever they started."""
        for process in self.ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def stop_all(arms: list[Arm]) -> None:
    """Let all arms end by themselves, and kill those that do not."""
    for arm in arms:
        arm.ask({"stop": True})
    deadline = time.monotonic() + GRACE_S
    for arm in arms:
        arm.stop(deadline)


def told(log: Path, status: int) -> str:
    """What a rank's log says of its end: its last error, else its last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    said = [line for line in lines if line]
    errors = [line for line in said if ERROR.match(line)]
    return f"exit status {status}: {(errors or said or ['it printed nothing'])[-1]}"


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port: int = bound.getsockname()[1]
        return port


def _environment(rank: int, world: int, port: int) -> dict[str, str]:
    """As torchrun sets it; one thread a rank where there are several, as torchrun has it too."""
    found = dict(
        os.environ,
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        GROUP_RANK="0",
        WORLD_SIZE=str(world),
        LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    if world > 1:
        found.setdefault("OMP_NUM_THREADS", "1")
    return found
