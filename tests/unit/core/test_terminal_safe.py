"""Names and logs from outside cannot act on a terminal."""

from __future__ import annotations

import pytest

from nfold.core.format import terminal_safe


@pytest.mark.parametrize(
    ("hostile", "text"),
    [
        ("a\x1b[31mb", "a\\x1b[31mb"),
        ("a\nb", "a b"),
        ("a\x00b", "a\\x00b"),
        ("a\u202eb", "a\\u202eb"),
        ("Übung – 2 × 日本", "Übung – 2 × 日本"),
    ],
)
def test_nothing_in_a_text_acts(hostile: str, text: str) -> None:
    assert terminal_safe(hostile) == text


def test_lines_are_kept_on_request() -> None:
    assert terminal_safe("a\nb\tc\x1b", keep_lines=True) == "a\nb c\\x1b"
