"""Which lines take the time of fetches, in a process of its own: pytest-timeout uses the alarm here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from nfold.instrument.input.fetch_lines import find_place

SCRIPT = """
import json, os, signal, sys, time
from nfold.instrument.input.fetch_lines import FetchLineSampler

def work():
    until = time.process_time() + 0.03
    while time.process_time() < until:
        sum(range(100))  # busy

def fetch():
    work()
    time.sleep(0.01)  # waits
    return 7

if sys.argv[1] == "alarm":
    signal.signal(signal.SIGALRM, lambda *_: None)
sampler = FetchLineSampler()
if os.fork() == 0:
    assert [sampler.run(1, fetch) for _ in range(10)] == [7] * 10
    os._exit(0)
os.wait()
assert sampler.run(0, fetch) == 7
time.sleep(0.2)
sampler.run(0, fetch)
print(json.dumps([[line.location, line.code, line.fraction] for line in sampler.lines()]))
"""


def sampled(folder: Path, kind: str) -> list[tuple[str, str, float]]:
    (folder / "fetching.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "fetching.py", kind],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    return [(location, code, fraction) for location, code, fraction in json.loads(done.stdout)]


def test_lines_of_workers_have_their_part_of_the_time(tmp_path: Path) -> None:
    parts = dict.fromkeys(("busy", "waits"), 0.0)
    for location, code, fraction in sampled(tmp_path, "no alarm"):
        assert location.startswith("fetching.py:")
        for name in parts:
            parts[name] += fraction * code.endswith(f"# {name}")
    assert parts["busy"] > parts["waits"] > 0
    assert sum(parts.values()) <= 1.001


def test_a_script_keeps_its_own_alarm(tmp_path: Path) -> None:
    assert not sampled(tmp_path, "alarm")


def test_bytecode_without_a_line_is_passed_over() -> None:
    code = SimpleNamespace(co_filename=str(Path("train.py").absolute()))
    outer = SimpleNamespace(f_code=code, f_lineno=7, f_back=None)
    inner: Any = SimpleNamespace(f_code=code, f_lineno=None, f_back=outer)
    assert find_place(inner) == ("train.py:7", "")
