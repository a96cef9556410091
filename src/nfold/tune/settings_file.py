"""The tables of ``nfold tune`` in ``nfold.toml``: remedies that were kept, where, and their gains.

The other keys of the file are fields of a plan, which ``nfold train`` and ``nfold.Run`` read.
"""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nfold.core.errors import MachineUnfit, NfoldError, UnknownValue, UsageError, closest_first
from nfold.core.machine import Machine
from nfold.core.plan import TUNE_TABLE, Plan
from nfold.core.redaction import expand_home, redact_arguments
from nfold.core.serialization import deserialize, read_value, replace_file, serialize
from nfold.core.stats import Interval
from nfold.core.variant import LOADER_FIELDS, RunRemedies, Variant
from nfold.core.workload import MODULE_FLAG, Workload
from nfold.interventions.intervention import NUMERICS, Intervention, WorkloadFacts
from nfold.interventions.registry import REGISTRY

SETTINGS_SCHEMA = 1
AGAIN = "nfold tune SCRIPT measures again"


def keepable_remedies() -> tuple[str, ...]:
    """Return the names of the remedies that ``nfold run`` can apply to a script."""
    found = [name for name, each in REGISTRY.items() if keeping_refusal(each) is None]
    return (*LOADER_FIELDS, *found)


def keeping_refusal(intervention: Intervention[Any]) -> str | None:
    """Return why ``nfold run`` cannot apply the intervention to a script, or None."""
    if intervention.kind != "remedy":
        return "it only measures"
    script = WorkloadFacts(name="the script", is_script=True)
    refused = intervention.torch_refusal(intervention.default, Plan(), script)
    return refused or intervention.refused_in_runs or None


@dataclass(frozen=True, kw_only=True)
class KeptRemedy:
    """One remedy that was kept.

    Attributes:
        name: an intervention, or one of ``LOADER_FIELDS``.
        value: its value; the default of an intervention changes nothing.
        numerics: a training with the remedy has the ``same`` numbers, differs by ``rounding``, or is
            another ``training``. Empty: as the intervention says.
        place: line of the script that it concerns, such as ``train.py:31``; empty if there is none.
        reason: why it was kept, in words.
        gain: throughput with the remedy over that without it, with its 95 % interval.
    """

    name: str
    value: Any
    numerics: str = ""
    place: str = ""
    reason: str = ""
    gain: Interval | None = None

    def __post_init__(self) -> None:
        if self.name not in keepable_remedies():
            reason = keeping_refusal(REGISTRY[self.name]) if self.name in REGISTRY else None
            if reason is None:
                raise UnknownValue("remedy", self.name, keepable_remedies())
            allowed = ", ".join(closest_first(self.name, keepable_remedies()))
            raise UsageError(f"remedy {self.name!r}: {reason}; allowed are {allowed}")
        if self.numerics not in ("", *NUMERICS):
            raise UnknownValue(f"numerics of {self.name}", self.numerics, NUMERICS)
        intervention = REGISTRY.get(self.name)
        if intervention is None:
            Plan(**{self.name: self.value})
            if self.value is None:
                raise UsageError(f"{self.name} without a value: allowed are whole numbers from 0")
            return
        try:
            value = read_value(intervention.value_type, serialize(self.value), self.name)
        except ValueError as error:
            raise UsageError(f"remedy {error}; next: remove it, or {AGAIN}") from None
        object.__setattr__(self, "value", value)  # a list of TOML is a tuple
        intervention.check(value)

    @property
    def numerics_class(self) -> str:
        """``same``, ``rounding`` or ``training``."""
        own = REGISTRY[self.name].numerics if self.name in REGISTRY else "same"
        return self.numerics or own or "same"


@dataclass(frozen=True, kw_only=True)
class TunedSettings:
    """The remedies that ``nfold tune`` has kept for one script on one machine.

    Attributes:
        command: path and arguments of the script, or ``-m``, a module and its arguments, as in
            ``Workload.script``. Written without secrets, and with ``~`` for the home folder.
        code: fingerprint of the script, ``Workload.code``.
        device: kind of device, ``cuda`` or ``cpu``.
        devices: number of devices.
        ranks: processes that ``nfold run`` starts; 0: one per device.
        machine: ``Machine.id``.
        description: ``Machine.summary``.
        versions: versions of ``torch`` and ``nfold``.
        when: date and time in UTC, ISO 8601.
        gain: throughput with all remedies over that of the original, with its 95 % interval.
        remedies: in the order of their gains.
    """

    command: tuple[str, ...]
    code: str
    device: str
    devices: int
    ranks: int = 0
    machine: str
    description: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    when: str = ""
    gain: Interval | None = None
    remedies: tuple[KeptRemedy, ...] = ()

    def __post_init__(self) -> None:
        if not self.command:
            raise UsageError("command is empty: allowed are a script and its arguments")
        if self.ranks < 0:
            raise UsageError(f"ranks {self.ranks}: allowed are whole numbers from 0")
        Plan(device=self.device, devices=self.devices)

    @property
    def processes(self) -> int:
        """Ranks that ``nfold run`` starts."""
        return self.ranks or self.devices

    def run_remedies(self, device: str | None = None, ranks: int | None = None) -> RunRemedies:
        """Return the remedies of a run on a kind of device; default: as in the settings."""
        devices = self.devices if ranks in (None, self.processes) else ranks
        plan = _permissive_plan(device or self.device, devices)
        values: dict[str, Any] = {}
        refused: list[tuple[str, str]] = []
        for remedy in self.remedies:
            intervention = REGISTRY.get(remedy.name)
            reason = intervention and intervention.refusal(remedy.value, plan)
            if reason:
                refused.append((remedy.name, reason))
            else:
                values[remedy.name] = remedy.value
        of_loaders = {name: values.pop(name, None) for name in LOADER_FIELDS}
        return RunRemedies(variant=Variant(**values), **of_loaders, refused=tuple(refused))

    def mismatches(
        self, script: Workload, device: str, ranks: int, machine: Machine
    ) -> list[NfoldError]:
        """Return why the settings do not hold for this run, the most important first.

        ``ranks`` are those of all nodes. UsageError: another script, or a changed one. MachineUnfit:
        other devices, or another machine.
        """
        found: list[NfoldError] = []
        if self._fingerprint(script) != self.code:
            found.append(_changed_script(self, script))
        if (device, ranks) != (self.device, self.processes):
            found.append(
                MachineUnfit(
                    f"the remedies were measured with {_ranks(self.processes, self.device)}, this run "
                    f"has {_ranks(ranks, device)}; next: --devices {self.device}:{self.processes}, or "
                    f"--force applies them unmeasured, or {AGAIN}"
                )
            )
        if machine.id != self.machine:
            found.append(_other_machine(self, machine))
        return found

    def other_arguments(self, script: Workload) -> str | None:
        """Return a warning if the script has other arguments than those that were measured."""
        own, measured = _arguments(redact_arguments(script.script)), _arguments(self.command)
        if own == _arguments(redact_arguments(self.command)):
            return None
        return (
            f"the remedies were measured with arguments {shlex.join(measured) or '(none)'}, this "
            f"run has {shlex.join(own) or '(none)'}: gains may differ"
        )

    def _fingerprint(self, script: Workload) -> str:
        # With the arguments of the settings: other arguments alone do not change the script.
        arguments = map(expand_home, _arguments(self.command))
        if script.module is not None:
            return Workload.from_module(script.module, *arguments).code
        return Workload.from_script(script.script[0], *arguments).code

    def to_toml(self) -> str:
        """Return the tables of the settings as TOML."""
        values = serialize(self)
        values |= {"command": list(redact_arguments(self.command)), "ranks": self.ranks or None}
        remedies = {each.pop("name"): each for each in values.pop("remedies")}
        return "\n".join(
            _toml_table((TUNE_TABLE,), {"schema": SETTINGS_SCHEMA, **values, "remedies": remedies})
        )

    @classmethod
    def from_toml(cls, text: str) -> TunedSettings:
        """Return the settings in the text of a file.

        Raises UsageError if it is not TOML, has no settings, is of a newer nfold, or has an unknown
        name or a value of another type.
        """
        try:
            values = tomllib.loads(text).get(TUNE_TABLE)
        except tomllib.TOMLDecodeError as error:
            raise UsageError(f"not TOML: {error}") from None
        if not isinstance(values, dict):
            raise UsageError(f"no table [{TUNE_TABLE}]; next: nfold tune SCRIPT writes it")
        schema = values.pop("schema", None)
        if schema != SETTINGS_SCHEMA:
            newer = isinstance(schema, int) and schema > SETTINGS_SCHEMA
            advice = "a newer nfold wrote it; next: upgrade nfold, or" if newer else "next:"
            raise UsageError(f"schema {schema}: allowed is {SETTINGS_SCHEMA}; {advice} {AGAIN}")
        _check_keys(values)
        remedies = _remedy_entries(values.get("remedies", {}))
        try:
            return deserialize(cls, {**values, "remedies": remedies})
        except ValueError as error:
            message = str(error).replace(cls.__name__, TUNE_TABLE, 1)
            for index, entries in enumerate(remedies):
                message = message.replace(f"remedies[{index}]", f"remedies.{entries['name']}", 1)
            raise UsageError(f"{message}; next: correct it, or {AGAIN}") from None

    @classmethod
    def read(cls, file: Path) -> TunedSettings:
        """Return the settings in a file; raises UsageError that names it."""
        try:
            return cls.from_toml(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise UsageError(
                f"{file} does not exist; allowed is a file of nfold tune; next: {AGAIN}"
            ) from None
        except (UsageError, OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{file}: {error}") from None

    def write(self, file: Path) -> None:
        """Write the settings into a file in place of earlier ones; its other lines stay.

        Raises UsageError if the file exists and is not TOML.
        """
        try:
            before = file.read_text(encoding="utf-8") if file.exists() else ""
            others = tomllib.loads(before)
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise UsageError(f"{file}: {error}; next: correct or remove it") from None
        others.pop(TUNE_TABLE, None)
        kept = _without_tune_tables(before)
        if tomllib.loads(kept) != others:
            raise UsageError(
                f"{file}: the lines of [{TUNE_TABLE}] cannot be told from the others; next: write "
                f"[{TUNE_TABLE}] as a table at the end of the file, or remove it"
            )
        with replace_file(file) as temporary:
            temporary.write_text(f"{kept}\n{self.to_toml()}" if kept else self.to_toml())


def _check_keys(values: Mapping[str, Any]) -> None:
    needed = ("command", "code", "device", "devices", "machine")
    for name in values:
        if name not in TunedSettings.__dataclass_fields__:
            raise UnknownValue(
                f"key of [{TUNE_TABLE}]", name, ["schema", *TunedSettings.__dataclass_fields__]
            )
    if missing := [name for name in needed if name not in values]:
        raise UsageError(f"[{TUNE_TABLE}] has no {', '.join(missing)}; next: {AGAIN}")


def _remedy_entries(tables: Any) -> list[dict[str, Any]]:
    if not isinstance(tables, dict):
        raise UsageError(
            f"remedies {tables!r}: allowed are tables [{TUNE_TABLE}.remedies.NAME]; next: {AGAIN}"
        )
    found = []
    for name, table in tables.items():
        # ``channels_last = true`` is short for a table that has only a value.
        entries = table if isinstance(table, dict) else {"value": table}
        if "value" not in entries:
            raise UsageError(f"remedy {name!r} has no value; next: remove it, or {AGAIN}")
        found.append({**entries, "name": name})
    return found


def _permissive_plan(device: str, devices: int) -> Plan:
    """Return a plan that refuses a remedy only because of its devices."""
    return Plan(
        device=device,
        devices=devices,
        strategy="ddp" if devices > 1 else "single",
        accumulate=2,
        batch_norm="synchronised",
        precision="fp32",
    )


def _ranks(count: int, device: str) -> str:
    kind = "GPU" if device == "cuda" else "CPU"
    return f"{count} {kind} rank{'s' * (count != 1)}"


def _arguments(command: tuple[str, ...]) -> tuple[str, ...]:
    return command[2:] if command[:1] == (MODULE_FLAG,) else command[1:]


def _changed_script(settings: TunedSettings, script: Workload) -> UsageError:
    when = f" on {settings.when}" if settings.when else ""
    return UsageError(
        f"{script.name} is not what was measured{when} ({shlex.join(settings.command)}): it, a file "
        "that it depends on, or an environment variable that it or a library reads has changed; "
        f"next: {AGAIN}, or --force applies the remedies unmeasured"
    )


def _other_machine(settings: TunedSettings, machine: Machine) -> MachineUnfit:
    versions = ", ".join(f"{name} {version}" for name, version in settings.versions.items())
    measured = "; ".join(part for part in (settings.description, versions) if part)
    torch = machine.versions.get("torch", "not installed")
    return MachineUnfit(
        f"the remedies were measured on machine {settings.machine} ({measured or 'not described'}), "
        f"this is {machine.id} ({machine.summary}; torch {torch}); next: {AGAIN}, or --force applies "
        "them unmeasured"
    )


def _toml_table(path: tuple[str, ...], values: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a table and of the tables in it, without empty values."""
    kept = {name: value for name, value in values.items() if value not in (None, "", {}, [])}
    plain = {name: value for name, value in kept.items() if not isinstance(value, dict)}
    if plain:
        yield f"[{'.'.join(path)}]"
        yield from (f"{name} = {_toml_value(value)}" for name, value in plain.items())
        yield ""
    for name, value in kept.items():
        if isinstance(value, dict):
            yield from _toml_table((*path, name), value)


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(map(_toml_value, value))}]"
    if isinstance(value, str):
        # A string of JSON is one of TOML, except that TOML escapes one more character.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)


TABLE_HEADER = re.compile(r"\s*\[\[?\s*([^\]]*)\]")


def _without_tune_tables(text: str) -> str:
    """Return the lines that belong to no table of the settings."""
    kept, is_own = [], False
    for line in text.splitlines():
        if header := TABLE_HEADER.match(line):
            is_own = header[1].partition(".")[0].strip(" \"'") == TUNE_TABLE
        if not is_own:
            kept.append(line)
    joined = "\n".join(kept).rstrip()
    return f"{joined}\n" if joined else ""
