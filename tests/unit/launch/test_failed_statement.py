"""The statement that an error comes from, and what an assertion about a remainder demands."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from nfold.core.source_location import error_location
from nfold.engines import rank_process
from nfold.launch.rank_lifecycle import build_failure

GLOBAL = "steps = 3\nranks = 2\n{}assert steps % ranks == 0\n"
PARSED = """
import argparse, types
parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=6)
args = parser.parse_args()
job = types.SimpleNamespace(get_world_size=lambda: 4)
assert args.batch_size % job.get_world_size() == 0, "the batch must divide"
"""


@pytest.mark.parametrize(
    ("code", "arguments", "text"),
    [
        (
            GLOBAL.format(""),
            [],
            "AssertionError ({}:3 `assert steps % ranks == 0`); next: set steps = 4",
        ),
        (
            GLOBAL.format("names = list(globals())\n"),
            [],
            "AssertionError ({}:4 `assert steps % ranks == 0`); next: pass --steps=4",
        ),
        (
            GLOBAL.format(""),
            ["--steps=3"],
            "AssertionError ({}:3 `assert steps % ranks == 0`); next: pass --steps=4",
        ),
        (
            PARSED,
            [],
            "AssertionError: the batch must divide ({}:7 `assert args.batch_size % "
            "job.get_world_size() == 0`); next: pass --batch-size=8",
        ),
        ("ranks = 2\nassert ranks == 1", [], "AssertionError ({}:2 `assert ranks == 1`)"),
        (
            "def check(steps):\n    assert steps % 2 == 0\ncheck(3)",
            [],
            "AssertionError ({}:2 `assert steps % 2 == 0`)",
        ),
        ("rank = 1\n[0][rank]", [], "IndexError: list index out of range ({}:2 `[0][rank]`)"),
        ("raise ValueError('no')", [], "ValueError: no ({}:1)"),
    ],
)
def test_an_error_names_its_statement_and_what_would_satisfy_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, arguments: list[str], text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    name = f"train_{abs(hash((code, *arguments)))}.py"  # linecache keeps the lines of a file
    Path(name).write_text(code)
    with pytest.raises(Exception) as raised:  # noqa: PT011
        rank_process.run_script(name, arguments)
    failure = build_failure(raised.value, 0, None, error_location(raised.value))
    assert failure.text == text.format(name)
