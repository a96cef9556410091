"""Rows of results, one JSON object a line: each is added when it is known, and read again."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def add(file: Path | None, row: Any) -> None:
    """A dataclass, at the end of the file, if there is one."""
    if file is not None:
        with file.open("a") as opened:
            opened.write(json.dumps(dataclasses.asdict(row)) + "\n")


def read(files: Iterable[Path]) -> list[dict[str, Any]]:
    """All rows of these files, in their order."""
    return [json.loads(line) for file in files for line in file.read_text().splitlines() if line]
