"""SIGKILL during store writes: the file stays whole and no acknowledged row is lost."""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import textwrap
from contextlib import closing
from pathlib import Path

import pytest

import measured
from nfold.store.store import DATABASE_FILE, Store

KILLS = int(os.environ.get("NFOLD_STORE_KILLS", "40"))
"""Set it to 1000 for the long run."""

WRITER = textwrap.dedent(
    """
    import dataclasses, itertools, json, os, sys
    from pathlib import Path
    from nfold.core.measurement import Measurement
    from nfold.store.store import Store

    results, made, life = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    measurement = Measurement.from_dict(json.loads(made.read_text()))
    store = Store.open(results)
    for number in itertools.count():
        name = f"{life}-{number}"
        store.append(dataclasses.replace(measurement, id=name, repeat=int(life) * 10**6 + number))
        os.write(1, f"{name}\\n".encode())
    """
)


@pytest.mark.slow(parts=8)
@pytest.mark.integration
@pytest.mark.timeout(600)
def test_killed_writers_lose_no_acknowledged_row(tmp_path: Path) -> None:
    made = tmp_path / "made.json"
    made.write_text(_json())
    draw = random.Random(0)
    acknowledged: list[str] = []
    for life in range(KILLS):
        acknowledged += _written_before_kill(tmp_path, made, life, rows=draw.randrange(1, 30))
    with closing(sqlite3.connect(tmp_path / DATABASE_FILE)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    with Store.open_readonly(tmp_path) as store:
        stored = {m.id for m in store.measurements()}
    assert len(acknowledged) >= KILLS
    assert set(acknowledged) <= stored


def _json() -> str:
    return json.dumps(measured.measurement(devices=2).to_dict())


def _written_before_kill(results: Path, made: Path, life: int, rows: int) -> list[str]:
    """Names that the writer had acknowledged when it was killed, at least ``rows`` of them."""
    command = [sys.executable, "-c", WRITER, str(results), str(made), str(life)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        names = [writer.stdout.readline().strip() for _ in range(rows)]
        writer.send_signal(signal.SIGKILL)
        names += [line.strip() for line in writer.stdout if line.endswith("\n")]
    assert writer.returncode == -signal.SIGKILL
    return names
