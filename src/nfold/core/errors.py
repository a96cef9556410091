"""All errors that nfold raises on purpose, and the exit code of each.

    NfoldError                      exit 1   a run failed
    ├── UsageError                  exit 2   invalid options, files or arguments
    │   └── UnknownValue            exit 2   a name or value that is not in a list (closest first)
    ├── MachineUnfit                exit 4   the machine or its environment cannot do it
    │   ├── DevicesMissing          exit 4   more devices requested than exist
    │   ├── DataMissing             exit 4   a data file does not exist
    │   ├── DataCorrupt             exit 4   a data file does not match its checksum
    │   ├── ExtraMissing            exit 4   an optional dependency is not installed
    │   └── StoreUnusable           exit 4   the store has a newer schema, is locked or not writable
    └── RunFailure                  exit 1   raised inside a rank; becomes a measurement's status
        ├── Unsupported             status unsupported
        ├── OutOfMemory             status oom
        ├── Diverged                status diverged
        ├── Hung                    status hung
        ├── Killed                  status killed
        ├── Mismatch                status crashed: a result differs from its reference
        └── Collateral              status crashed: this rank failed because another rank did

Exceptions of other libraries are translated where nfold calls the library. A message contains the
bad value, the allowed values and the next step.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class NfoldError(Exception):
    """Base of all errors that nfold raises on purpose."""

    exit_code = 1


class UsageError(NfoldError):
    """Invalid options, files or arguments."""

    exit_code = 2


class UnknownValue(UsageError):
    """A name or value that is not allowed. ``allowed`` has the closest match first."""

    def __init__(self, what: str, value: object, allowed: Iterable[object]) -> None:
        self.value = value
        self.allowed = closest_first(str(value), [str(item) for item in allowed])
        super().__init__(f"unknown {what} {str(value)!r}: allowed are {', '.join(self.allowed)}")


class MachineUnfit(NfoldError):
    """The machine, or the software on it, cannot do what was requested."""

    exit_code = 4


class DevicesMissing(MachineUnfit):
    """More devices were requested than exist."""


class DataMissing(MachineUnfit):
    """A data file does not exist. The message has its path and how to get it."""


class DataCorrupt(MachineUnfit):
    """A data file does not match its checksum or its own header."""


class ExtraMissing(MachineUnfit):
    """An optional dependency is not installed. The message has the command that installs it."""

    def __init__(self, library: str, extra: str) -> None:
        super().__init__(f"{library} is not installed; next: pip install 'nfold[{extra}]'")


class StoreUnusable(MachineUnfit):
    """The results store has a newer schema, or cannot be opened or written."""


class RunFailure(NfoldError):
    """A failure inside a rank, which becomes the status of a measurement.

    ``step`` is the optimizer step of the failure, None if it is unknown.
    """

    status = "crashed"

    def __init__(self, message: str, *, step: int | None = None) -> None:
        self.step = step
        super().__init__(message)


class Unsupported(RunFailure):
    """The framework cannot run this plan. The message is the reason."""

    status = "unsupported"


class OutOfMemory(RunFailure):
    """A device or the host ran out of memory. ``peak_memory_bytes`` was allocated at that time."""

    status = "oom"

    def __init__(
        self, message: str, *, step: int | None = None, peak_memory_bytes: int | None = None
    ) -> None:
        self.peak_memory_bytes = peak_memory_bytes
        super().__init__(message, step=step)


class Diverged(RunFailure):
    """The loss became NaN or infinite."""

    status = "diverged"


class Hung(RunFailure):
    """A rank made no step for longer than the hang timeout."""

    status = "hung"


class Killed(RunFailure):
    """A signal from outside ended a rank."""

    status = "killed"


class Mismatch(RunFailure):
    """A computed result differs from its reference by more than the tolerance."""


class Collateral(RunFailure):
    """This rank failed because another rank did; never the root cause."""


def closest_first(value: str, allowed: Sequence[str]) -> list[str]:
    """Order ``allowed`` by similarity to ``value``; ties keep their order."""

    def difference(item: str) -> float:
        return -difflib.SequenceMatcher(None, value.lower(), item.lower()).ratio()

    return sorted(allowed, key=difference)
