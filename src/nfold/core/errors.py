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
        ├── Unsupported             status unsupported: the message is the reason
        │   └── EndedEarly          status unsupported: a script ended after too few steps
        ├── OutOfMemory             status oom
        ├── Diverged                status diverged: the loss became NaN or infinite
        ├── Hung                    status hung: no step for longer than the hang timeout
        ├── Killed                  status killed: by a signal from outside
        ├── Mismatch                status crashed: a result differs from its reference
        └── Collateral              status crashed: this rank failed because another rank did

Exceptions of other libraries are translated where nfold calls the library. A message contains the
bad value, the allowed values and the next step.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from functools import partial


class NfoldError(Exception):
    exit_code = 1


class UsageError(NfoldError):
    exit_code = 2


class UnknownValue(UsageError):
    def __init__(self, what: str, value: object, allowed: Iterable[object]) -> None:
        self.value = value
        self.allowed = closest_first(str(value), [str(item) for item in allowed])
        super().__init__(f"unknown {what} {str(value)!r}: allowed are {', '.join(self.allowed)}")


class MachineUnfit(NfoldError):
    exit_code = 4


class DevicesMissing(MachineUnfit):
    """More devices were requested than exist."""


class DataMissing(MachineUnfit):
    """A data file does not exist. The message has its path and how to get it."""


class DataCorrupt(MachineUnfit):
    """A data file does not match its checksum or its own header."""


class ExtraMissing(MachineUnfit):
    def __init__(self, library: str, extra: str) -> None:
        super().__init__(f"{library} is not installed; next: pip install 'nfold[{extra}]'")


class StoreUnusable(MachineUnfit):
    """The results store has a newer schema, or cannot be opened or written."""


class RunFailure(NfoldError):
    """``step`` is the optimizer step of the failure, None if it is unknown."""

    status = "crashed"

    def __init__(self, message: str, *, step: int | None = None) -> None:
        self.step = step
        super().__init__(message)


class Unsupported(RunFailure):
    status = "unsupported"


class EndedEarly(Unsupported):
    """A script ended by itself after too few steps; it left its training loop at ``left_at``."""

    def __init__(self, message: str, *, step: int, left_at: str | None = None) -> None:
        self.left_at = left_at
        super().__init__(message, step=step)


class OutOfMemory(RunFailure):
    """``peak_memory_bytes`` was allocated at that time."""

    status = "oom"

    def __init__(
        self, message: str, *, step: int | None = None, peak_memory_bytes: int | None = None
    ) -> None:
        self.peak_memory_bytes = peak_memory_bytes
        super().__init__(message, step=step)


class Diverged(RunFailure):
    status = "diverged"


class Hung(RunFailure):
    status = "hung"


class Killed(RunFailure):
    status = "killed"


class Mismatch(RunFailure):
    """A computed result differs from its reference by more than the tolerance."""


class Collateral(RunFailure):
    """This rank failed because another rank did; never the root cause."""


def closest_first(value: str, allowed: Sequence[str]) -> list[str]:
    """Order ``allowed`` by similarity to ``value``; ties keep their order."""
    matcher = partial(difflib.SequenceMatcher, None, value.lower())
    return sorted(allowed, key=lambda item: -matcher(item.lower()).ratio())
