"""Keep the result of a tuning: nfold.toml, and a patch of the script's files that runs of it confirm."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import nfold
from nfold.core.machine import Machine
from nfold.core.script_profile import ScriptProfile
from nfold.core.serialization import replace_file
from nfold.core.source_edit import SetVariable, SourceEdit
from nfold.core.workload import Workload
from nfold.interventions.registry import REGISTRY
from nfold.tune.plan_edits import loader_worker_edits
from nfold.tune.remedies import Remedy
from nfold.tune.result import TuneResult
from nfold.tune.settings_file import KeptRemedy, TunedSettings
from nfold.tune.source_patch import SourcePatch, make_patch

TOML_FILE, PATCH_FILE = "nfold.toml", "nfold.patch"


@dataclass(frozen=True, kw_only=True)
class RemedyPatch:
    """The patch of all remedies that were kept, as far as the sources allow it.

    ``carried`` are remedies that the patch and its ``variables`` contain as a whole, ``notes`` say
    what to do for the others.
    """

    patch: SourcePatch
    carried: tuple[Remedy, ...]
    notes: tuple[str, ...]

    @property
    def variables(self) -> tuple[SetVariable, ...]:
        return self.patch.variables

    def applied_at_run_time(
        self, kept: tuple[Remedy, ...], profile: ScriptProfile
    ) -> tuple[Remedy, ...]:
        """Return the remedies to apply to runs of an edited copy.

        Those that the sources do not carry, variables, and plan fields, which otherwise say what the
        original script has.
        """

        def is_in_sources(remedy: Remedy) -> bool:
            edits = source_edits(remedy, profile) or ()
            of_files = any(not isinstance(edit, SetVariable) for edit in edits)
            return remedy in self.carried and of_files and not remedy.is_plan_field

        return tuple(one for one in kept if not is_in_sources(one))

    def write_copies(self, folder: Path, script_folder: Path) -> tuple[tuple[str, str], ...]:
        """Write the edited files below ``folder``; return (original path, path of the copy)."""
        found = []
        for file in self.patch.files:
            copy = folder / file.path
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(file.edited)
            found.append((str((script_folder / file.path).absolute()), str(copy.absolute())))
        return tuple(found)


def source_edits(remedy: Remedy, profile: ScriptProfile) -> tuple[SourceEdit, ...] | None:
    """Return the edits that keep a remedy in the script; None if no place is known."""
    if remedy.name == "workers":
        return loader_worker_edits(remedy.value, profile)
    if remedy.is_plan_field:
        return None
    return REGISTRY[remedy.name].source_edits(remedy.value, profile)


def place_of(remedy: Remedy, profile: ScriptProfile) -> str:
    """Return the line that a remedy concerns, ``train.py:31``; empty if there is none."""
    edits = source_edits(remedy, profile) or ()
    return next((edit.location for edit in edits if not isinstance(edit, SetVariable)), "")


def patch_remedies(
    remedies: tuple[Remedy, ...], profile: ScriptProfile, folder: Path
) -> RemedyPatch:
    """Return the patch of the script whose lines are relative to ``folder``."""
    edits = {remedy: source_edits(remedy, profile) for remedy in remedies}
    whole = {remedy: own for remedy, own in edits.items() if own}
    notes = [f"{one.label}: nfold knows no line to change" for one in remedies if not edits[one]]
    # A remedy is in the patch with all of its edits, or not at all.
    for remedy, own in [*whole.items()]:
        alone = make_patch(own, folder)
        if alone.refusals or alone.flags:
            del whole[remedy]
            notes += [f"{remedy.label}: {one}" for one in (*alone.flags, *alone.refusals)]
    patch = make_patch([edit for own in whole.values() for edit in own], folder)
    failed: set[SourceEdit] = {one.edit for one in patch.refusals}
    failed |= {one.edit for one in patch.flags}
    notes += [str(one) for one in patch.refusals]
    carried = tuple(one for one, own in whole.items() if not failed & set(own))
    return RemedyPatch(patch=patch, carried=carried, notes=tuple(notes))


def write_settings(
    result: TuneResult, workload: Workload, machine: Machine, file: Path, profile: ScriptProfile
) -> None:
    """Write the remedies of a script to nfold.toml, with their evidence."""
    gains = {one.remedy: one.gain for one in result.tried}
    plan = result.final.plan
    settings = TunedSettings(
        command=workload.script,
        code=workload.code,
        device=str(plan.device),
        devices=result.devices,
        ranks=1 if plan.strategy == "dp" else 0,
        machine=machine.id,
        description=machine.summary,
        versions=dict(_versions()),
        when=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        gain=result.verification.gain,
        remedies=tuple(
            KeptRemedy(
                name=one.name,
                value=one.value,
                numerics=one.numerics,
                place=place_of(one, profile),
                reason=one.reason,
                gain=gains.get(one),
            )
            for one in result.kept
        ),
    )
    settings.write(file)


def write_patch(patch: SourcePatch, file: Path) -> None:
    with replace_file(file) as temporary:
        temporary.write_bytes(patch.diff)


def _versions() -> Iterator[tuple[str, str]]:
    from importlib.metadata import version

    yield "torch", version("torch")
    yield "nfold", nfold.__version__
