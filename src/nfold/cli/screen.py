"""Lines that stay and, on a terminal, live ones below them that are drawn anew."""

from __future__ import annotations

import os
from types import TracebackType
from typing import TextIO


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
        """Take the live lines away and show the cursor again."""
        self._live.stop()

    def print_line(self, line: str) -> None:
        """A line above the live ones."""
        from rich.text import Text

        self._console.print(Text(line))

    def show_live(self, *lines: str) -> None:
        """Draw the live lines anew, each cut to the terminal's width."""
        from rich.text import Text

        self._live.update(Text("\n".join(lines), no_wrap=True, overflow="ellipsis"))


def open_screen(stream: TextIO, *, plain: bool) -> PlainScreen:
    """Live on a terminal, unless the user asked for plain lines or no colour."""
    plain = plain or "NO_COLOR" in os.environ or not stream.isatty()
    return PlainScreen(stream) if plain else LiveScreen(stream)
