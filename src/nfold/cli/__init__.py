"""The command line of nfold.

``app`` declares the commands, ``options`` their options. Each command has one module, which is
imported when the command runs. ``render`` prints tables, ``progress`` prints live lines.

Exit codes: 0 ok · 1 a run failed · 2 usage · 4 machine or environment unfit · 128 + signal.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType


def main() -> None:
    """Run the ``nfold`` command and exit."""
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # nohup
        signal.signal(signal.SIGINT, exit_on_interrupt)  # before the imports, which take a while
    from nfold.core.errors import NfoldError
    from nfold.core.format import terminal_safe

    debug, arguments = without_debug(sys.argv[1:])
    from nfold.cli.app import app

    try:
        app(args=arguments, prog_name="nfold")
    except NfoldError as error:
        if debug:
            raise
        sys.stderr.write(f"nfold: error: {terminal_safe(str(error), keep_lines=True)}\n")
        sys.exit(error.exit_code)
    except BrokenPipeError:
        # Python would report the closed pipe once more when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)
    except Exception as error:
        if debug:
            raise
        text = terminal_safe(f"{type(error).__name__}: {error}")
        sys.stderr.write(f"nfold: internal error: {text}; next: --debug shows the traceback\n")
        sys.exit(1)


def exit_on_interrupt(signum: int, _: FrameType | None) -> None:
    """End this process at once with one line; commands that record results replace this handler."""
    os.write(2, b"nfold: stopped by Ctrl-C\n")
    os._exit(128 + signum)


def without_debug(arguments: list[str]) -> tuple[bool, list[str]]:
    """Return whether ``--debug`` is among the arguments, and the arguments without it.

    Arguments after ``run`` are not read: they may belong to the script.
    """
    words = [index for index, argument in enumerate(arguments) if not argument.startswith("-")]
    end = words[0] if words and arguments[words[0]] == "run" else len(arguments)
    own, others = arguments[:end], arguments[end:]
    return "--debug" in own, [argument for argument in own if argument != "--debug"] + others
