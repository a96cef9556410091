"""The command line: one file a subcommand, each imported when it is called for.

Exit codes: 0 ok · 1 a run failed · 2 usage · 3 threshold or verification not met · 4 machine or
environment unfit · 128 + signal.
"""

from __future__ import annotations

import os
import signal
import sys

from nfold.errors import NfoldError


def main() -> None:
    """Entry of the ``nfold`` command."""
    debug = "--debug" in sys.argv[1:]
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    from nfold.cli.app import app

    try:
        app(args=arguments, prog_name="nfold")
    except NfoldError as error:
        if debug:
            raise
        sys.stderr.write(f"nfold: error: {inert(str(error))}\n")
        sys.exit(error.exit_code)
    except BrokenPipeError:
        # Whoever read our output has seen enough; Python would complain again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)
    except Exception as error:
        if debug:
            raise
        text = inert(f"{type(error).__name__}: {error}")
        sys.stderr.write(f"nfold: internal error: {text}; next: --debug shows where\n")
        sys.exit(1)


def inert(text: str) -> str:
    """Text with its control characters written out, so that it cannot steer a terminal."""
    return "".join(c if c.isprintable() or c == "\n" else f"\\x{ord(c):02x}" for c in text)
