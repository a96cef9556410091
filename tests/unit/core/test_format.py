from __future__ import annotations

import pytest

from nfold.core import format
from nfold.core.stats import Interval


@pytest.mark.parametrize(
    ("value", "text"),
    [(36660.4, "36,660"), (123.4, "123"), (12.34, "12.3"), (1.834, "1.83"), (0.1234, "0.123")],
)
def test_numbers_have_about_three_digits(value: float, text: str) -> None:
    assert format.format_number(value) == text


def test_an_interval_has_the_places_of_its_value() -> None:
    interval = Interval(12.34, 12.01, 12.9)
    assert format.format_range(interval) == "12.0–12.9"
    assert format.format_half_width(interval) == "±0.6"


def test_without_an_interval_nothing_is_written() -> None:
    assert format.format_range(Interval(3.0)) == ""
    assert format.format_half_width(Interval(3.0)) == ""


@pytest.mark.parametrize(
    ("seconds", "text"), [(69.07, "69.1 s"), (1395.2, "0:23:15"), (11027.0, "3:03:47")]
)
def test_durations(seconds: float, text: str) -> None:
    assert format.format_duration(seconds) == text


def test_memory_has_its_unit() -> None:
    assert format.format_bytes(3 * 2**29) == "1.50 GiB"
    assert format.format_bytes(100 * 2**20) == "100 MiB"


def test_lists_and_marks() -> None:
    assert format.join_words(["a"]) == "a"
    assert format.join_words(["a", "b", "c"]) == "a, b and c"
    assert format.superscript((1, 12)) == "¹˒¹²"
    assert format.pluralize(1, "device") == "1 device"
