"""What is trained, as a value: a built-in name and its parameters, written on one line."""

from __future__ import annotations

import re
from dataclasses import dataclass

from nfold.errors import UsageError

NAME = re.compile(r"[a-z][a-z0-9_]*")
PARAMETER = re.compile(r"([a-z][a-z0-9_]*)=(-?[0-9]{1,18})")


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A workload's name and the parameters that differ from its defaults, ordered by name.

    The written form is ``name`` or ``name:key=value,key=value``, for example
    ``wide_resnet:depth=16,width=4``. Parameters are integers. Whether the name and the
    parameters exist is the catalogue's to say (``nfold.workloads``).
    """

    name: str
    parameters: tuple[tuple[str, int], ...] = ()

    @classmethod
    def parse(cls, text: str) -> Workload:
        """The workload that ``text`` writes; UsageError where it is not of the form."""
        name, separator, rest = text.partition(":")
        if not NAME.fullmatch(name) or (separator and not rest):
            raise UsageError(_malformed(text))
        found: dict[str, int] = {}
        for part in rest.split(",") if rest else ():
            match = PARAMETER.fullmatch(part.strip())
            if match is None:
                raise UsageError(_malformed(text))
            if match[1] in found:
                raise UsageError(f"workload {text!r} gives {match[1]!r} twice")
            found[match[1]] = int(match[2])
        return cls(name=name, parameters=tuple(sorted(found.items())))

    def __str__(self) -> str:
        written = ",".join(f"{key}={value}" for key, value in self.parameters)
        return f"{self.name}:{written}" if written else self.name

    def with_parameters(self, **changes: int) -> Workload:
        """The same workload with some parameters set."""
        merged = {**dict(self.parameters), **changes}
        return Workload(name=self.name, parameters=tuple(sorted(merged.items())))


def _malformed(text: str) -> str:
    return (
        f"workload {text!r} is not of the form NAME or NAME:KEY=INTEGER,...; "
        "for example wide_resnet:depth=16,width=4"
    )
