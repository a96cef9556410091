"""``nfold --help`` answers at once because it imports little."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("torch", "numpy", "rich", "psutil", "pynvml", "sqlite3", "altair", "scipy", "pyarrow")
ASK = """
import sys
from nfold import cli
sys.argv = ["nfold", *{arguments!r}]
try:
    cli.main()
except SystemExit as ended:
    sys.stderr.write(",".join(sorted(sys.modules)))
    raise
"""


def _loaded(*arguments: str) -> set[str]:
    code = ASK.format(arguments=list(arguments))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "Usage: nfold" in done.stdout
    return set(done.stderr.split(","))


def test_help_imports_nothing_heavy() -> None:
    for arguments in (("--help",), ("bench", "--help")):
        assert not _loaded(*arguments) & set(HEAVY)
