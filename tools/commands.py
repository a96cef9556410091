"""Write the reference of all commands from what each of them prints as its help.

    python tools/commands.py docs/commands.md

The help is asked for as plain text of a fixed width, so that the reference does not depend on the
terminal. Nothing in it is written by hand: change the command, then run ``make docs``.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

PLAIN = {"TYPER_USE_RICH": "0", "COLUMNS": "100", "TERMINAL_WIDTH": "100", "NO_COLOR": "1"}
HEAD = """# Commands

What every command says of itself with `--help`; written by `make docs`, not by hand.
"""
LISTED = re.compile(r"^Commands:\n((?:  .*\n?)+)", re.MULTILINE)


def main() -> None:
    """Write the reference to the file that is named."""
    Path(sys.argv[1]).write_text(reference())


def reference() -> str:
    """The whole page: nfold itself, then a section for every subcommand in nfold's own order."""
    top = said()
    sections = [HEAD, block(top)]
    for name in subcommands(top):
        sections += [f"## `nfold {name}`\n", block(said(name))]
    return "\n".join(sections)


def subcommands(top: str) -> list[str]:
    """The names below ``Commands:``; a line that goes on with a description is indented more."""
    found = LISTED.search(top)
    if found is None:
        raise SystemExit(f"nfold --help lists no commands:\n{top}")
    return re.findall(r"^  (\w[\w-]*)", found[1], re.MULTILINE)


def said(*names: str) -> str:
    """What a command prints with --help."""
    command = [sys.executable, "-m", "nfold", *names, "--help"]
    environment = {**os.environ, **PLAIN}
    environment.pop("FORCE_COLOR", None)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return done.stdout


def block(text: str) -> str:
    """Text as a block of a page, without spaces at the ends of lines."""
    lines = "\n".join(line.rstrip() for line in text.strip().splitlines())
    return f"```text\n{lines}\n```\n"


if __name__ == "__main__":
    main()
