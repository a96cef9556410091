"""Golden files: what a screen prints, in tests/golden.

NFOLD_UPDATE_GOLDEN=1 pytest tests/unit/cli/test_screens.py writes them again; look at the diff.
"""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = Path(__file__).with_name("golden")


def check_golden(name: str, text: str) -> None:
    """Compare ``text`` with the golden file ``name``, without spaces at the ends of lines."""
    found = "\n".join(line.rstrip() for line in text.rstrip().splitlines()) + "\n"
    file = FOLDER / name
    if os.environ.get("NFOLD_UPDATE_GOLDEN") == "1":
        file.write_text(found)
    assert found == file.read_text(), f"{file} differs; next: NFOLD_UPDATE_GOLDEN=1"
