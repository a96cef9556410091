"""The error tree: as drawn, with the exit code of each, and messages that help."""

from __future__ import annotations

import inspect
import re

import pytest

from nfold.core import errors
from nfold.core.errors import (
    ExtraMissing,
    NfoldError,
    OutOfMemory,
    RunFailure,
    UnknownValue,
    closest_first,
)
from nfold.core.measurement import STATUSES

DRAWN = re.compile(r"^    ([│ ├└─]*)(\w+) +(exit \d|status \w+)", re.MULTILINE)
INDENT = 4


def drawn() -> dict[str, tuple[str, str]]:
    """Each class of the drawing: its parent and what is message beside it."""
    assert errors.__doc__ is not None
    above: list[str] = []
    found = {}
    for match in DRAWN.finditer(errors.__doc__):
        depth = len(match[1]) // INDENT
        above = [*above[:depth], match[2]]
        found[match[2]] = (above[depth - 1] if depth else "Exception", match[3])
    return found


def defined() -> dict[str, type[NfoldError]]:
    members = inspect.getmembers(errors, inspect.isclass)
    return {name: kind for name, kind in members if issubclass(kind, NfoldError)}


def test_the_drawing_shows_every_error_under_its_parent() -> None:
    parents = {name: kind.__bases__[0].__name__ for name, kind in defined().items()}
    assert {name: parent for name, (parent, _) in drawn().items()} == parents


def test_the_diagram_has_every_exit_code_and_status() -> None:
    for name, (_, message) in drawn().items():
        kind = defined()[name]
        word, value = message.split()
        if word == "exit":
            assert kind.exit_code == int(value), name
        else:
            assert issubclass(kind, RunFailure)
            assert kind.status == value, name
            assert kind.exit_code == 1, name


def test_every_failure_is_a_status_of_a_measurement() -> None:
    found = [kind.status for kind in defined().values() if issubclass(kind, RunFailure)]
    assert set(found) <= set(STATUSES)


def test_an_unknown_value_names_the_value_and_the_allowed_ones() -> None:
    error = UnknownValue("layout", "chanels_last", ["channels_first", "channels_last"])
    message = "unknown layout 'chanels_last': allowed are channels_last, channels_first"
    assert str(error) == message
    assert error.allowed == ["channels_last", "channels_first"]


def test_a_hostile_value_is_inert() -> None:
    assert "\x1b" not in str(UnknownValue("workload", "\x1b[2J\n", ["digits"]))


@pytest.mark.parametrize(
    ("value", "first"),
    [("wideresnet", "wide_resnet"), ("CNN", "cnn10"), ("minst", "mnist"), ("conv", "conv2d")],
)
def test_the_closest_match_is_first(value: str, first: str) -> None:
    names = ["digits", "mnist", "cnn10", "wide_resnet", "conv2d"]
    assert closest_first(value, names)[0] == first
    assert sorted(closest_first(value, names)) == sorted(names)


def test_ties_keep_their_order() -> None:
    assert closest_first("zzz", ["b", "a", "c"]) == ["b", "a", "c"]


def test_a_missing_extra_is_the_command_that_installs_it() -> None:
    message = "pyarrow is not installed; next: pip install 'nfold[images]'"
    assert str(ExtraMissing("pyarrow", "images")) == message


def test_a_failure_knows_its_step_and_its_memory() -> None:
    error = OutOfMemory("no room", step=3, peak_memory_bytes=5)
    assert (str(error), error.step, error.peak_memory_bytes) == ("no room", 3, 5)
    assert RunFailure("x").step is None
