"""Text from outside (names, paths, logs) made safe to print: it steers no terminal."""

from __future__ import annotations


def terminal_safe(text: str, *, keep_lines: bool = False) -> str:
    """``text`` with control and direction characters written out, as ``\\x1b``.

    Line breaks and tabs become spaces, so that a name cannot break a table; with
    ``keep_lines`` line breaks stay.
    """
    return "".join(_escape_character(character, keep_lines) for character in text)


def _escape_character(character: str, keep_lines: bool) -> str:
    if character.isprintable() or (keep_lines and character == "\n"):
        return character
    return " " if character in "\n\t" else ascii(character)[1:-1]
