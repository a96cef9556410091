"""The console that tables go to: 100 columns wide, plain where it is not a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
