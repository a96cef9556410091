"""The options that commands which run a plan have in common, as they were given."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nfold.bench.grid import LIST_AXES, GridAxes
from nfold.core.errors import UsageError
from nfold.launch.launch_spec import RunOptions, check_positive_seconds


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """A plan's fields as text, and how it is run, by the names of the commands' parameters."""

    devices: str | None
    device: str | None
    batch: str | None
    accumulate: str | None
    strategy: str | None
    exchange: str | None
    batch_norm: str | None
    layout: str | None
    precision: str | None
    framework: str | None
    input_: str | None
    decode: str | None
    cache: str | None
    skip_bad: bool
    augment: str | None
    step: str | None
    kernels: str | None
    steps_per_execution: str | None
    allocation: str | None
    workers: str | None
    seed: str | None
    again: bool
    results: Path
    data: Path | None
    telemetry_interval: float
    hang_timeout: float
    as_json: bool
    plain: bool

    def __post_init__(self) -> None:
        check_positive_seconds(
            telemetry_interval=self.telemetry_interval, hang_timeout=self.hang_timeout
        )

    @property
    def axis_fields(self) -> dict[str, str | None]:
        """The plan fields that take a list, as text; None where nothing was said."""
        return {name: self.input_ if name == "input" else getattr(self, name) for name in LIST_AXES}

    @property
    def single_fields(self) -> dict[str, Any]:
        """The other plan fields that were said."""
        device = {"device": self.device} if self.device else {}
        return device | ({"bad_images": "skip"} if self.skip_bad else {})

    def plan_changes(self, axes: GridAxes, command: str) -> dict[str, Any]:
        """The plan fields that were said, of ``axes`` one value each; UsageError for a list."""
        found = self.single_fields
        for name, entries in axes.changes.items():
            if len(entries) != 1:
                flag = f"--{name.replace('_', '-')} {self.axis_fields[name]}"
                raise UsageError(f"{flag}: {command} takes one value; next: nfold bench")
            found |= entries[0]
        return found

    def run_options(self, **more: Any) -> RunOptions:
        """How a run is watched over; ``more`` are fields that a command knows besides."""
        return RunOptions(
            results=self.results,
            telemetry_interval_s=self.telemetry_interval,
            hang_timeout_s=self.hang_timeout,
            **more,
        )
