"""Every error that nfold raises on purpose, and the exit code of each.

    NfoldError                      exit 1   a run failed
    ├── UsageError                  exit 2   what was asked for cannot be understood
    │   └── UnknownValue            exit 2   a name or value that is not in a list (closest first)
    ├── MachineUnfit                exit 4   the machine or its environment cannot do it
    │   ├── DevicesMissing          exit 4   more devices than there are
    │   ├── DataMissing             exit 4   a data file is not there
    │   ├── DataCorrupt             exit 4   a data file is not what its checksum says
    │   ├── ExtraMissing            exit 4   an optional dependency is not installed
    │   └── StoreUnusable           exit 4   the store is of a newer schema, locked or not writable
    └── RunFailure                  exit 1   raised inside a rank; becomes a measurement's status
        ├── Unsupported             status unsupported
        ├── OutOfMemory             status oom
        ├── Diverged                status diverged
        ├── Hung                    status hung
        ├── Killed                  status killed
        ├── Mismatch                status crashed: a result differs from its reference
        └── Collateral              status crashed: this rank failed because another one did

Foreign exceptions are translated at the seam where they come in and nowhere else. A message
says the value, the allowed values and the next step.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class NfoldError(Exception):
    """Base of all errors that nfold raises on purpose."""

    exit_code = 1


class UsageError(NfoldError):
    """What was asked for cannot be understood."""

    exit_code = 2


class UnknownValue(UsageError):
    """A name or a value that is not among the allowed ones.

    ``allowed`` is ordered with the closest match first, and the message lists it that way.
    """

    def __init__(self, what: str, value: object, allowed: Iterable[object]) -> None:
        self.value = value
        self.allowed = closest_first(str(value), [str(item) for item in allowed])
        super().__init__(f"unknown {what} {str(value)!r}: allowed are {', '.join(self.allowed)}")


class MachineUnfit(NfoldError):
    """The machine, or what is installed on it, cannot do what was asked for."""

    exit_code = 4


class DevicesMissing(MachineUnfit):
    """More devices were asked for than exist."""


class DataMissing(MachineUnfit):
    """A data file is not there. The message says which, where it was looked for, how to get it."""


class DataCorrupt(MachineUnfit):
    """A data file is not what its pinned checksum or its own header says. Names the file."""


class ExtraMissing(MachineUnfit):
    """An optional dependency is not installed. The message is the command that installs it."""

    def __init__(self, library: str, extra: str) -> None:
        super().__init__(f"{library} is not installed; next: pip install 'nfold[{extra}]'")


class StoreUnusable(MachineUnfit):
    """The results store is of a newer schema, or cannot be opened or written."""


class RunFailure(NfoldError):
    """A failure inside a rank. It becomes a measurement's status, never a traceback to the user.

    ``step`` is the optimizer step in which it happened, None where that is not known.
    """

    status = "crashed"

    def __init__(self, message: str, *, step: int | None = None) -> None:
        self.step = step
        super().__init__(message)


class Unsupported(RunFailure):
    """The framework cannot do this plan. The message is the reason."""

    status = "unsupported"


class OutOfMemory(RunFailure):
    """A device, or the host, ran out of memory; ``peak_memory_bytes`` is what was held."""

    status = "oom"

    def __init__(
        self, message: str, *, step: int | None = None, peak_memory_bytes: int | None = None
    ) -> None:
        self.peak_memory_bytes = peak_memory_bytes
        super().__init__(message, step=step)


class Diverged(RunFailure):
    """The loss became NaN or infinite. The message names the step."""

    status = "diverged"


class Hung(RunFailure):
    """A rank made no step for longer than the hang timeout."""

    status = "hung"


class Killed(RunFailure):
    """A rank was ended by a signal from outside."""

    status = "killed"


class Mismatch(RunFailure):
    """A computed result differs from its reference by more than the tolerance."""


class Collateral(RunFailure):
    """This rank failed because another one did: never the root cause."""


def closest_first(value: str, allowed: Sequence[str]) -> list[str]:
    """Order ``allowed`` by likeness to ``value``, the likest first; ties keep their order."""

    def unlikeness(item: str) -> float:
        return -difflib.SequenceMatcher(None, value.lower(), item.lower()).ratio()

    return sorted(allowed, key=unlikeness)
