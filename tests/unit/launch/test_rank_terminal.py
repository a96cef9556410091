"""The terminal of a rank: its size is known, reading it ends at once, its output stays a file."""

from __future__ import annotations

import json
import os
import subprocess
import sys

SCRIPT = """
import json, os, shutil, sys
from nfold.launch.rank_terminal import open_terminal, provide_terminal_size
open_terminal()
provide_terminal_size()
def ask():
    try:
        return input()
    except EOFError:
        return None
print(json.dumps({
    "stty": os.popen("stty size").read().split(),
    "sizes": [os.get_terminal_size(), os.get_terminal_size(2), shutil.get_terminal_size()],
    "reads": [ask(), ask(), sys.stdin.read(), os.popen("cat").read()],
    "terminals": [os.isatty(0), os.isatty(1), os.isatty(2)],
}), flush=True)
os.execvp("sh", ["sh", "-c", "stty size; cat"])
"""


def run_python(code: str) -> str:
    ended = subprocess.run(
        [sys.executable, "-c", code],
        # readline, which pytest imports, sets these variables behind os.environ.
        env={k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return ended.stdout


def test_a_rank_has_a_terminal_without_input() -> None:
    found, program = run_python(SCRIPT).splitlines()
    assert json.loads(found) == {
        "stty": ["30", "100"],
        "sizes": [[100, 30]] * 3,
        "reads": [None, None, "", ""],
        "terminals": [True, False, False],
    }
    assert program == "30 100"


def test_without_pseudo_terminals_standard_input_stays() -> None:
    no_terminal = "import os\ndef fail(): raise OSError\nos.openpty = fail\n"
    code = "open_terminal()\nprovide_terminal_size()\nprint(os.isatty(0), *os.get_terminal_size())"
    module = "from nfold.launch.rank_terminal import open_terminal, provide_terminal_size\n"
    assert run_python(no_terminal + module + code) == "False 100 30\n"
