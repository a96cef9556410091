"""The console that tables go to: 100 columns wide, plain where it is not a terminal."""

from __future__ import annotations

import os
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console

CONSOLE_WIDTH = 100


def make_console(*, plain: bool = False) -> Console:
    """At most 100 columns, and exactly as many where piped; ``plain`` has no style at all."""
    from rich.console import Console

    made = Console(
        highlight=False, markup=False, emoji=False, color_system=None if plain else "auto"
    )
    if not made.is_terminal or made.width > CONSOLE_WIDTH:
        made.width = CONSOLE_WIDTH
    return made


class PlainScreen:
    """A stream of lines, no escape codes: what is live is not shown."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __enter__(self) -> PlainScreen:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Nothing to put back."""

    def print_line(self, line: str) -> None:
        """A line that stays."""
        self._stream.write(line + "\n")
        self._stream.flush()

    def print_progress(self, line: str) -> None:
        """A line of progress: kept where nothing is live."""
        self.print_line(line)

    def show_live(self, *lines: str) -> None:
        """The live lines, in place of those before."""


class LiveScreen(PlainScreen):
    """The same lines above live ones, which go away at the end."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        from rich.console import Console
        from rich.live import Live

        self._console = Console(file=stream, highlight=False)
        self._live = Live(console=self._console, refresh_per_second=4, transient=True)

    def __enter__(self) -> LiveScreen:
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
    """Live on a terminal, unless the user asked for plain lines or no colour."""
    plain = plain or "NO_COLOR" in os.environ or not stream.isatty()
    return PlainScreen(stream) if plain else LiveScreen(stream)
