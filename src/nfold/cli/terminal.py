"""Consoles for tables (at most 100 columns) and screens for progress lines."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from nfold.core.format import terminal_safe

if TYPE_CHECKING:
    from rich.console import Console

CONSOLE_WIDTH = 100
MIN_WIDTH = 40
Line = tuple[str, str]
"""A line and its style."""


def make_console(*, plain: bool = False) -> Console:
    """Return a console of at most 100 columns; of exactly 100 if the output is piped.

    ``plain`` turns off all styles.
    """
    from rich.console import Console

    colours: Any = None if plain else "auto"
    console = Console(highlight=False, markup=False, emoji=False, color_system=colours)
    if not console.is_terminal or console.width > CONSOLE_WIDTH:
        console.width = CONSOLE_WIDTH
    return console


def print_lines(lines: Callable[[int], Sequence[Line]], *, plain: bool = False) -> None:
    """Print styled lines, never cropped; ``lines`` makes them for a width in columns."""
    from rich.text import Text

    console = make_console(plain=plain)
    width = console.width if console.is_terminal else CONSOLE_WIDTH
    for text, style in lines(width):
        console.print(Text(text, style=style), no_wrap=True, overflow="ignore", crop=False)


def wrap_lines(text: str, width: int, style: str = "", indent: str = "") -> list[Line]:
    """Return a text without control characters in lines of at most ``width`` columns."""
    found = textwrap.wrap(
        terminal_safe(text),
        max(width, MIN_WIDTH),
        subsequent_indent=indent,
        break_on_hyphens=False,
        break_long_words=True,
    )
    return [(line, style) for line in found]


class PlainScreen:
    """Prints lines to a stream, without escape codes. Live lines are not shown."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __enter__(self) -> PlainScreen:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def print_line(self, line: str) -> None:
        """Print a line that stays."""
        self._stream.write(line + "\n")
        self._stream.flush()

    def print_progress(self, line: str) -> None:
        """A line of progress: kept where nothing is live."""
        self.print_line(line)

    def show_live(self, *lines: str) -> None:
        """Replace the live lines."""


class LiveScreen(PlainScreen):
    """Prints lines above live lines, which disappear at the end."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        from rich.console import Console
        from rich.live import Live

        self._console = Console(file=stream, highlight=False)
        self._live = Live(console=self._console, refresh_per_second=4, transient=True)

    def __enter__(self) -> LiveScreen:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def print_line(self, line: str) -> None:
        from rich.text import Text

        self._console.print(Text(line))

    def print_progress(self, line: str) -> None:
        """The live lines show it."""

    def show_live(self, *lines: str) -> None:
        from rich.text import Text

        self._live.update(Text("\n".join(lines), no_wrap=True, overflow="ellipsis"))


def open_screen(stream: TextIO, *, plain: bool) -> PlainScreen:
    """Return a live screen on a terminal, else (or if ``plain`` or NO_COLOR is set) a plain one."""
    plain = plain or "NO_COLOR" in os.environ or not stream.isatty()
    return PlainScreen(stream) if plain else LiveScreen(stream)
