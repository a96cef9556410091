"""Keep the result of a tuning: nfold.toml, and a patch of the script's files that runs of it confirm."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Iterator
from pathlib import Path

import nfold
from nfold.core.fingerprint import module_file
from nfold.core.machine import Machine
from nfold.core.script_profile import ScriptProfile
from nfold.core.serialization import replace_file
from nfold.core.source_edit import SetKeywords, SetVariable, SourceEdit
from nfold.core.source_location import display_path
from nfold.core.variant import Variant
from nfold.core.workload import Workload
from nfold.interventions.intervention import Intervention
from nfold.interventions.registry import REGISTRY
from nfold.tune.conversion.conversion_edits import plan_conversion
from nfold.tune.plan_edits import learning_rate_advice, loader_batch_size
from nfold.tune.plan_fields import TUNABLE_FIELDS
from nfold.tune.remedies import Remedy, largest_change
from nfold.tune.result import ConvertedScript, EditedCopy, TuneResult
from nfold.tune.settings_file import KeptRemedy, TunedSettings
from nfold.tune.source_patch import SourcePatch, make_patch

TOML_FILE, PATCH_FILE = "nfold.toml", "nfold.patch"


def source_edits(remedy: Remedy, profile: ScriptProfile) -> tuple[SourceEdit, ...] | None:
    """Return the edits that keep a remedy in the script; None if no place is known."""
    if remedy.is_plan_field:
        edits = TUNABLE_FIELDS[remedy.name].edits
        return None if edits is None else edits(remedy.value, profile)
    if remedy.in_run:
        return Variant.run_plan.source_edits(tuple(remedy.fields.items()), profile)
    return REGISTRY[remedy.name].source_edits(remedy.value, profile)


def place_of(remedy: Remedy, profile: ScriptProfile) -> str:
    """Return the line that a remedy concerns, ``train.py:31``; empty if there is none."""
    edits = source_edits(remedy, profile) or ()
    return next((edit.location for edit in edits if not isinstance(edit, SetVariable)), "")


def edit_script(
    remedies: tuple[Remedy, ...],
    profile: ScriptProfile,
    converted: EditedCopy,
    *,
    folder: Path,
    copies: Path,
) -> EditedCopy:
    """Write copies of a script's files with the remedies; lines are relative to ``folder``.

    A remedy is in the copies with all of its edits, or not at all. They also have the edits of
    ``converted``.
    """
    edits = {remedy: source_edits(remedy, profile) for remedy in remedies}
    whole = {remedy: own for remedy, own in edits.items() if own}
    notes = [f"{one.label}: {_by_hand(one)}" for one in remedies if not edits[one]]
    notes += _advice_for_batch(remedies, profile)
    for remedy, own in [*whole.items()]:
        alone = make_patch(own, folder)
        if alone.refusals or alone.flags:
            del whole[remedy]
            notes += [f"{remedy.label}: {one}" for one in (*alone.flags, *alone.refusals)]
    edits_of_remedies = [edit for own in whole.values() for edit in own]
    patch = make_patch([*converted.patch.edits, *edits_of_remedies], folder)
    notes += [*(str(one) for one in patch.refusals), *converted.notes]
    made = set(patch.edits)
    in_sources = [
        remedy
        for remedy, own in whole.items()
        if not remedy.is_plan_field
        and (of_files := {edit for edit in own if not isinstance(edit, SetVariable)})
        and of_files <= made
    ]
    return EditedCopy(
        patch=patch,
        sources=tuple(_write_copies(patch, folder, copies)),
        at_run_time=tuple(one for one in remedies if one not in in_sources),
        notes=tuple(notes),
    )


def _advice_for_batch(remedies: Iterable[Remedy], profile: ScriptProfile) -> Iterator[str]:
    for one in remedies:
        if one.name == "batch":
            before = profile.training_loader.batch_size or 1
            factor = loader_batch_size(one.value, profile) / before
            yield f"{one.label}: {learning_rate_advice(factor)}"


def _by_hand(remedy: Remedy) -> str:
    known = not remedy.is_plan_field and not remedy.in_run
    return (REGISTRY[remedy.name] if known else Intervention).by_hand


def convert_script(
    profile: ScriptProfile, workload: Workload, folder: Path, copies: Path
) -> ConvertedScript:
    """Write copies of a script's files with nfold.Run, and copies that do not shuffle the samples."""
    file = workload.script[0]
    if workload.module is not None:
        file = module_file(workload.module, str(folder)) or ""
    plan = plan_conversion(profile, display_path(Path(file).absolute()), folder)
    patch = make_patch(plan.edits, folder)
    refusal = plan.obstacle or next((str(one) for one in patch.refusals), "")
    if refusal:
        return ConvertedScript(obstacle=refusal)
    created = profile.training_loader.created_at or ""
    keywords = (("shuffle", "False"),)
    order = SetKeywords(location=created, function="DataLoader", keywords=keywords)
    original, ordered = make_patch([order], folder), make_patch([order, *plan.edits], folder)
    is_ordered = all(order in one.edits and not one.refusals for one in (original, ordered))
    sources = tuple(_write_copies(patch, folder, copies / "converted"))
    return ConvertedScript(
        copy=EditedCopy(patch=patch, sources=sources, notes=plan.notes),
        ordered_original=tuple(_write_copies(original, folder, copies / "ordered-original"))
        if is_ordered
        else (),
        ordered_copy=tuple(_write_copies(ordered, folder, copies / "ordered-copy"))
        if is_ordered
        else sources,
    )


def _write_copies(patch: SourcePatch, folder: Path, copies: Path) -> Iterator[tuple[str, str]]:
    for file in patch.files:
        copy = copies / file.path
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(file.edited)
        yield str((folder / file.path).absolute()), str(copy.absolute())


def write_settings(
    result: TuneResult, workload: Workload, machine: Machine, file: Path, profile: ScriptProfile
) -> None:
    """Write the remedies of a script to nfold.toml, with their evidence."""
    plan = result.final.plan
    settings = TunedSettings(
        command=workload.script,
        code=workload.code,
        device=str(plan.device),
        devices=result.devices,
        ranks=1 if plan.strategy == "dp" else 0,
        machine=machine.id,
        description=machine.summary,
        versions={"torch": machine.versions["torch"], "nfold": nfold.__version__},
        when=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        gain=result.verification.gain,
        remedies=tuple(_kept_remedies(result, profile)),
    )
    settings.write(file)


def _kept_remedies(result: TuneResult, profile: ScriptProfile) -> Iterator[KeptRemedy]:
    """Yield the remedies; those of the plan of nfold.Run are one, without a gain of its own."""
    gains = {one.remedy: one.gain for one in result.tried}
    in_run = [one for one in result.kept if one.in_run]
    if in_run:
        yield KeptRemedy(
            name=Variant.run_plan.name,
            value=result.final.variant.run_plan,
            numerics=largest_change(in_run),
            place=place_of(in_run[0], profile),
            gain=gains.get(in_run[0]) if len(in_run) == 1 else None,
        )
    for one in result.kept:
        if not one.in_run:
            yield KeptRemedy(
                name=one.name,
                value=loader_batch_size(one.value, profile) if one.name == "batch" else one.value,
                numerics=one.numerics,
                place=place_of(one, profile),
                reason=one.reason,
                gain=gains.get(one),
            )


def write_patch(patch: SourcePatch, file: Path) -> None:
    with replace_file(file) as temporary:
        temporary.write_bytes(patch.diff)
