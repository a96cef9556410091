"""A built-in workload with costs of known size in it (planted.py), to be explained."""

from __future__ import annotations

import functools
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import planted_terms as planted
from own_clock import Doses, Readings, printed_ms
from targets import HERE, TAIL, singles

ON_GPUS = shlex.split("--step eager --precision bf16 --layout channels_last --input resident")
"""Of cnn10, so that its steps are launched one by one."""
OF_DEVICES = ("imbalance", "link", "synchronization")
"""Causes that keep a GPU busy; what keeps its host busy is hidden behind its steps."""


def importing() -> str:
    """A PYTHONPATH that has ``planted`` and what it needs, too."""
    return os.pathsep.join([str(HERE), str(HERE / "dosed"), os.environ.get("PYTHONPATH", "")])


@dataclass(frozen=True)
class Planted:
    """``planted.py``: digits on CPU devices, cnn10 on GPUs."""

    devices: str
    strong: bool = True
    switches: tuple[str, ...] = ()

    @property
    def cpu(self) -> bool:
        """Whether its devices are shares of the host's cores."""
        return self.devices.startswith("cpu")

    @property
    def causes(self) -> tuple[str, ...]:
        """Those that it can have on such devices."""
        return planted.CAUSES if self.cpu else OF_DEVICES

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """Those that are put in together."""
        return (("imbalance", "link"), *([("input", "synchronization")] if self.cpu else []))

    @functools.cached_property
    def readings(self) -> Readings:
        """What the workload's own clock has said of doses so far."""
        return Readings(drifts=self.cpu)

    @property
    def name(self) -> str:
        return f"{self.command()[0]} on {self.devices}"

    def command(self) -> list[str]:
        told = ["--devices", self.devices, "--strategy", "nfold"]
        if self.cpu:
            return ["planted:digits", *told]
        batch = planted.SHARES["pictures"] * int(self.devices)
        return ["planted:pictures", *told, "--batch", str(batch), *ON_GPUS]

    def learn(self, every: Sequence[Doses]) -> None:
        """Time every dose by the workload's own clock, all in one run."""
        self.readings.learn(singles(every), self.run)

    def environment(self, doses: Doses | Sequence[Doses], seed: int) -> dict[str, str]:
        return {planted.ENVIRONMENT: json.dumps(doses)}

    def injected(self, doses: Doses, found: Any) -> dict[str, float]:
        # Two devices halve a step's fixed cost; each has half of the samples of the input.
        parts = {"launch-bound": 2}
        return {c: self.readings.ms[c, dose] / parts.get(c, 1) for c, dose in doses.items()}

    def run(self, asked: Doses | Sequence[Doses]) -> str:
        """What ranks print while several doses have their turns."""
        steps = planted.SETTLING + len(asked) * (planted.WARMUP + planted.TIMED) + 1
        told = ["--steps", str(steps), "--warmup-steps", "1", "--no-report", "--plain"]
        with tempfile.TemporaryDirectory() as results:
            done = subprocess.run(
                [sys.executable, "-m", "nfold", "bench", *self.command(), *told,
                 "--results", results],
                env={**os.environ, "PYTHONPATH": importing(), **self.environment(asked, 0)},
                capture_output=True,
                text=True,
            )  # fmt: skip
            logs = sorted(Path(results).glob("measurements/*/rank-*.log"))
            text = "".join(log.read_text() for log in logs)
        ranks = int(self.devices.rpartition(":")[2])
        if done.returncode or len(printed_ms(text)) < ranks * len(asked):
            raise RuntimeError(f"{self.name}, {asked}: {(done.stderr + text)[-TAIL:]}")
        return text
