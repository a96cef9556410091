"""What is explained, and how a cause of known size gets into it.

``Simulated`` plants exact costs in the simulated framework, ``Script`` puts them into an unmodified
script through the environment (dosed/faults.py), planted_target.py into a built-in workload.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from asking_nfold import hidden_gpus
from own_clock import IN_TURNS, TIMED_STEPS, Asked, Doses, Readings, printed_ms

HERE = Path(__file__).resolve().parent
BASE: dict[str, Any] = {"compute_ms_per_sample": 0.1, "noise": 0.01, "process_noise": 0.005}
SHARE = 100
"""Samples of a device in a step, on the simulated framework: 10 ms."""
RECURRING = {f"{who}every-{k}": k for who in ("", "all-") for k in (5, 20, 50)}
"""What comes after so many steps only, on rank 0 or on all: it is found in *epoch-boundary*."""


def _recurring(cause: str, dose: float) -> dict[str, Any]:
    """One device pauses as often, in steps that are twice as long at the best."""
    every = RECURRING[cause]
    rank = None if cause.startswith("all") else 0
    return {"host_gap_ms": 2 * every * dose, "host_gap_every": every, "host_gap_rank": rank}


COSTS: dict[str, Callable[[float], dict[str, Any]]] = {
    "link": lambda dose: {"exchange_ms": dose},
    "synchronization": lambda dose: {"latency_ms": dose},
    "threads": lambda dose: {"contention_ms": dose},
    "imbalance": lambda dose: {"straggler_ms": dose, "straggler_rank": 1},
    # Two ranks of 4 workers on 4 cores: 10 ms of a lone device's loaders are hidden, twice not.
    "input": lambda dose: {"load_ms_per_sample": (10 + dose) * 4 / SHARE / 2, "host_cores": 4},
    # A fixed cost of one device is halved by two: half of it is lost to two-fold.
    "launch-bound": lambda dose: {"host_ms": 2 * dose},
    **{cause: functools.partial(_recurring, cause) for cause in RECURRING},
}
SCRIPTS = {
    "ddp": "ddp.py",
    "lightning": "with_lightning.py",
    "accelerate": "with_accelerate.py",
    "dataparallel": "dataparallel.py",
}
OF_THE_FIRST = ("imbalance-0", "every-1")
"""Of rank 0, in every step or after it: one device alone is as slow."""
OF_RANKS = (*OF_THE_FIRST, "host-work", "pass-0")
"""What one process that drives all devices is not asked for."""
EXACT = ("imbalance", "epoch-boundary", "pass-0", *OF_THE_FIRST, *RECURRING)
"""A rank that is busy for so long, workers that sleep for so long before each epoch."""
FOUND_IN = {
    "host-syncs": "synchronization",
    "host-work": "epoch-boundary",
    "pass-0": "epoch-boundary",
    **dict.fromkeys(OF_THE_FIRST, "imbalance"),
    **dict.fromkeys(RECURRING, "epoch-boundary"),
}
"""Rows that have another name: values that the host reads are a part of synchronization."""
OF_SEVERAL = ("imbalance", *OF_THE_FIRST, "synchronization", "link", "threads", "undivided-work")
"""What one device has nobody for."""
TAIL = 2000
"""Characters of a failed script's output that are told."""


def singles(every: Sequence[Doses]) -> list[Asked]:
    """Each cause at each dose, once."""
    found = {(cause, dose): None for doses in every for cause, dose in doses.items()}
    return list(found)


class Target(Protocol):
    """Something that can be explained with causes in it."""

    @property
    def name(self) -> str:
        """How records call it."""

    @property
    def causes(self) -> tuple[str, ...]:
        """Those that can be put in."""

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """Those that are put in together."""

    @property
    def switches(self) -> tuple[str, ...]:
        """Causes that have one dose only."""

    @property
    def strong(self) -> bool:
        """Whether N-fold is counted from one device at the whole global batch."""

    def command(self) -> list[str]:
        """What follows ``nfold explain``, without its own flags."""

    def environment(self, doses: Doses, seed: int) -> dict[str, str]:
        """What puts the doses in."""

    def injected(self, doses: Doses, found: Any) -> dict[str, float]:
        """Milliseconds that each dose costs a step on N devices; 0 where it is hidden."""


@dataclass(frozen=True)
class Simulated:
    """The simulated framework: two devices, steps of 10 ms."""

    name: str = "simulated"
    strong: bool = True
    switches: tuple[str, ...] = ()
    causes: tuple[str, ...] = tuple(COSTS)
    pairs: tuple[tuple[str, str], ...] = (
        ("imbalance", "link"),
        ("synchronization", "threads"),
        ("link", "launch-bound"),
    )

    def command(self) -> list[str]:
        options = ["--framework", "simulated", "--device", "cuda", "--devices", "2"]
        return ["digits", *options, "--batch", str(2 * SHARE), "--workers", "4"]

    def environment(self, doses: Doses, seed: int) -> dict[str, str]:
        script = {**BASE, "noise_seed": seed}
        for cause, dose in doses.items():
            script |= COSTS[cause](dose)
        return {"NFOLD_SIMULATED": json.dumps(script)}

    def injected(self, doses: Doses, found: Any) -> dict[str, float]:
        return {FOUND_IN.get(cause, cause): dose for cause, dose in doses.items()}


@dataclass(frozen=True)
class Script:
    """A script of ``dosed/`` that nfold knows nothing of, one rank a device.

    ``python`` has the script's libraries, ``arguments`` are added to the script's own.
    """

    kind: str
    devices: str
    python: str = sys.executable
    arguments: tuple[str, ...] = ()
    switches: tuple[str, ...] = ("undivided-work", "threads")

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """One device has nobody to wait for."""
        own = (("input", "storage"),)
        if self.count == 1:
            return own
        return (("imbalance", "link"), ("input", "synchronization"), ("imbalance", "input"), *own)

    @functools.cached_property
    def readings(self) -> Readings:
        """What the script's own clock has said of doses so far."""
        return Readings(drifts=self.cpu)

    @property
    def causes(self) -> tuple[str, ...]:
        """Those that this kind of script can have on such devices."""
        host = ("input", "storage", "epoch-boundary", "host-work", "pass-0")
        both = (*host, "imbalance", "synchronization", "link", "layout")
        cuda = () if self.cpu else ("host-syncs", "threads", "memory")
        # Accelerate and Lightning divide the work and move it to the device themselves.
        moving = ("copies",) if self.kind in ("ddp", "dataparallel") and not self.cpu else ()
        own = (*moving, "undivided-work") if self.kind == "ddp" else moving
        none = {*OF_RANKS, "synchronization", "link", "threads", "memory"} if self.strong else set()
        none |= set(OF_SEVERAL) if self.count == 1 else set()
        every = (*both, *OF_THE_FIRST, *RECURRING, *cuda, *own)
        return tuple(cause for cause in every if cause not in none)

    @property
    def strong(self) -> bool:
        """One process splits its batch over the devices; ranks each bring their own."""
        return self.kind == "dataparallel"

    @property
    def cpu(self) -> bool:
        """Whether its devices are shares of the host's cores."""
        return self.devices.startswith("cpu")

    @property
    def count(self) -> int:
        """How many devices."""
        return int(self.devices.rpartition(":")[2])

    @property
    def file(self) -> Path:
        """The script."""
        return HERE / "dosed" / SCRIPTS[self.kind]

    @property
    def name(self) -> str:
        return f"{self.kind} on {self.devices}"

    def command(self) -> list[str]:
        own = ["--", "--steps", "1000000", *self.arguments]
        return [str(self.file), "--devices", self.devices, *own]

    def learn(self, every: Sequence[Doses]) -> None:
        """Time every dose that is spent in a step by the script's own clock, all in one run."""
        asked = [(cause, dose) for cause, dose in singles(every) if cause in IN_TURNS]
        self.readings.learn(asked, self.run)

    def environment(self, doses: Doses | Sequence[Doses], seed: int) -> dict[str, str]:
        """What puts the doses in, or gives several their turns."""
        told = {"FAULTS": json.dumps(doses), "FAULTS_SETTLED": json.dumps(self.readings.settled)}
        return {**told, **hidden_gpus(self.devices)}

    def injected(self, doses: Doses, found: Any) -> dict[str, float]:
        """What the dose says where it is exact; else what the script's own clock says."""
        if set(doses) == {"undivided-work"}:
            whole = float(found["n_devices"]["step_ms"]["value"])
            return {"undivided-work": whole * (self.count - 1)}
        return {FOUND_IN.get(cause, cause): self._ms(cause, dose) for cause, dose in doses.items()}

    def _ms(self, cause: str, dose: float) -> float:
        if cause in EXACT or (cause == "host-work" and self.cpu):
            return dose
        if (cause, dose) in self.readings.ms:
            return self.readings.ms[cause, dose]
        return self.readings.beside({cause: dose}, self.run)

    def run(self, asked: Doses | Sequence[Doses]) -> str:
        """What the script prints by itself, with these doses or with several in turn."""
        with tempfile.TemporaryDirectory() as logs:
            done = subprocess.run(
                [self.python, *self.launcher(logs), str(self.file), "--steps", str(TIMED_STEPS),
                 *self.arguments],
                env={**os.environ, **self.environment(asked, 0)},
                capture_output=True,
                text=True,
            )  # fmt: skip
        ranks = 1 if self.strong else self.count
        turns = 1 if isinstance(asked, Mapping) else len(asked)
        if done.returncode or len(printed_ms(done.stdout)) < ranks * turns:
            raise RuntimeError(f"{self.name}, {asked}: {done.stderr[-TAIL:]}")
        return done.stdout

    def launcher(self, logs: str) -> list[str]:
        """One process for nn.DataParallel; else one a device, which nfold starts and leaves alone.

        So that threads, cores and the allocator are those of the runs that are explained.
        """
        if self.strong:
            return []
        ranks = ",".join(map(str, range(self.count)))
        told = ["--nproc-per-node", str(self.count), "--local-ranks-filter", ranks]
        return ["-m", "nfold", "run", *told, "--results", logs]
