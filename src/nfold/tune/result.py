"""The result of ``nfold tune``, as a value and as JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from nfold.core.script_profile import ScriptProfile
from nfold.core.serialization import JSON_SCHEMA_VERSION, serialize
from nfold.core.stats import Interval
from nfold.explain.design import Trial
from nfold.explain.result.budget import Budget
from nfold.tune.remedies import CONVERSION, Remedy
from nfold.tune.source_patch import SourcePatch


@dataclass(frozen=True, kw_only=True)
class Tried:
    """A remedy that was tried.

    ``outcome``: kept, no gain, dropped (not needed beside others), replaced, failed, changes training,
    refused, not tried. ``gain`` is the factor of the throughput beside what was kept before.
    ``lacked_time``: there was no time to try it, or none to try it alone.
    """

    remedy: Remedy
    outcome: str
    gain: Interval | None = None
    reason: str = ""
    lacked_time: bool = False

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.remedy.name,
            "value": self.remedy.value,
            "label": self.remedy.label,
            "tried_for": self.remedy.reason,
            "numerics": self.remedy.numerics,
            "outcome": self.outcome,
            "gain": serialize(self.gain),
            "predicted": serialize(self.remedy.predicted),
            "reason": self.reason,
        }


@dataclass(frozen=True, kw_only=True)
class EditedCopy:
    """The files of a script with the remedies that edits of them keep.

    ``patch`` has the edits, ``sources`` (path, path of the copy) of each edited file. Runs of the copy
    apply the remedies ``at_run_time``: environment variables, plan fields, which otherwise say what
    the original has, and what no edit keeps. For these, ``notes`` say what to do by hand.
    """

    patch: SourcePatch = field(default_factory=SourcePatch)
    sources: tuple[tuple[str, str], ...] = ()
    at_run_time: tuple[Remedy, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ConvertedScript:
    """A script that nfold.Run makes data-parallel, or ``obstacle``: the line that stands in the way.

    ``ordered_original`` and ``ordered_copy`` are sources as in EditedCopy that do not shuffle the
    samples, so that their losses can be compared; both are empty if no edit can do that.
    """

    copy: EditedCopy = field(default_factory=EditedCopy)
    ordered_original: tuple[tuple[str, str], ...] = ()
    ordered_copy: tuple[tuple[str, str], ...] = ()
    obstacle: str = ""


@dataclass(frozen=True, kw_only=True)
class Verification:
    """The original against the final settings in runs of their own; times are per step.

    ``objection``: how the final settings train another way than their remedies allow, or None;
    ``copy`` is the edited copy of a script, ``copy_objection`` how it trains another way, or why it is
    not faster.
    """

    gain: Interval | None
    original_ms: float | None
    final_ms: float | None
    objection: str | None = None
    pairs: int = 0
    copy: EditedCopy | None = None
    copy_objection: str | None = None

    @property
    def holds(self) -> bool:
        """Return whether the final settings are faster with certainty, and train the same."""
        low = self.gain.low if self.gain is not None else None
        return low is not None and low > 1 and self.objection is None


@dataclass(frozen=True, kw_only=True)
class TuneResult:
    """The result of ``nfold tune``.

    ``budget`` is the explanation of the original, ``final_budget`` that of what is left with the
    remedies that the first round kept, None if there was no time for it, and ``profile`` what its
    probe run observed in a script; ``losses`` says how the training was compared. ``sufficient_s`` is
    a time budget in seconds for what was not tried in time as well.
    """

    target: str
    devices: int
    original: Trial
    final: Trial
    kept: tuple[Remedy, ...]
    tried: tuple[Tried, ...]
    verification: Verification
    losses: str
    budget: Budget
    final_budget: Budget | None = None
    profile: ScriptProfile | None = None
    stopped: bool = False
    sufficient_s: float = 0.0

    @property
    def is_verified(self) -> bool:
        return bool(self.kept) and self.verification.holds

    @property
    def is_in_source_only(self) -> bool:
        """Return whether only the edited script has all that is kept, not nfold.toml."""
        return self.is_conversion or any(one.is_in_source_only for one in self.kept)

    @property
    def is_conversion(self) -> bool:
        """Return whether the final settings are the script with nfold.Run on all devices."""
        return any(one.name == CONVERSION for one in self.kept)

    def rate(self, step_ms: float | None) -> float | None:
        """Return the samples per second of a step."""
        return 1e3 * (self.original.plan.batch or 1) / step_ms if step_ms else None

    def to_json(self, files: dict[str, str]) -> dict[str, Any]:
        """Return the result in the form that ``--json`` prints; ``files`` are paths by kind."""
        by_name = {one.remedy: one for one in self.tried}
        verified = self.verification
        return {
            "schema": JSON_SCHEMA_VERSION,
            "target": self.target,
            "devices": self.devices,
            "original": {
                "step_ms": verified.original_ms,
                "samples_per_s": self.rate(verified.original_ms),
            },
            "final": {
                "step_ms": verified.final_ms,
                "samples_per_s": self.rate(verified.final_ms),
            },
            "gain": serialize(verified.gain),
            "verified": self.is_verified,
            "objection": verified.objection,
            "losses": self.losses,
            "kept": [by_name[one].to_json() for one in self.kept],
            "tried": [one.to_json() for one in self.tried],
            "files": files,
        }
