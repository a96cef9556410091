"""The terminal of a rank: for scripts that ask for the size of theirs. Its output stays a file."""

from __future__ import annotations

import os
import termios
from contextlib import suppress

COLUMNS, LINES = 100, 30


def open_terminal() -> None:
    """Make a pseudo-terminal the standard input of this process; every read finds its end.

    ``stty size`` reports its size. The output of the rank is no terminal: it has no colours.
    """
    with suppress(OSError, termios.error):  # a machine without pseudo-terminals: /dev/null stays
        master, slave = os.openpty()
        mode = termios.tcgetattr(slave)
        mode[3] &= ~(termios.ICANON | termios.ECHO)
        mode[6][termios.VMIN] = mode[6][termios.VTIME] = 0  # a read without input returns 0 bytes
        termios.tcsetattr(slave, termios.TCSANOW, mode)
        termios.tcsetwinsize(slave, (LINES, COLUMNS))
        os.dup2(slave, 0)
        os.close(slave)
        os.set_inheritable(master, True)  # a program that replaces the rank keeps the terminal


def provide_terminal_size() -> None:
    """Let ``os.get_terminal_size`` return a size where the rank's output, a file, has none."""
    original = os.get_terminal_size

    def get_terminal_size(fd: int = 1, /) -> os.terminal_size:
        for descriptor in (fd, 0):
            with suppress(OSError):
                return original(descriptor)
        return os.terminal_size((COLUMNS, LINES))

    os.get_terminal_size = get_terminal_size
