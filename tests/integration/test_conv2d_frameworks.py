"""conv2d on TensorFlow and JAX: real runs on two CPU devices, which verify themselves with scipy.

Every back end runs all of its cases in one process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow("conv2d in other frameworks", parts=6),
    pytest.mark.timeout(300),
]
CHILD = Path(__file__).parent / "scripts" / "conv2d_child.py"
TESTS = Path(__file__).parents[1]

PLAIN, WIDE, COPY = "conv2d:size=12", "conv2d:size=12,channels=3,filter=4", "conv2d:copy_only=1"
FIRST = {"layout": "channels_first"}
CASES: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "tensorflow": [
        (PLAIN, {}),
        (WIDE, {}),
        (COPY, {}),
        (WIDE, {"step": "eager"}),
        (WIDE, {"step": "compiled"}),
        (WIDE, {"step": "compiled", **FIRST}),
        (WIDE, FIRST),
    ],
    "jax": [(PLAIN, {}), (WIDE, {}), (COPY, {}), (WIDE, FIRST), (WIDE, {"step": "eager"})],
}
SAID = {"tensorflow": "only supports the NHWC", "jax": "allowed are compiled"}
"""What the last case of each is refused with."""
ONE_WAY = 7 * 12 * 12 * 4


@pytest.fixture(scope="module", params=list(CASES))
def answers(request: pytest.FixtureRequest) -> tuple[str, list[dict[str, Any]]]:
    """A back end, and what it answers to its cases and to a planted mistake."""
    name = request.param
    pytest.importorskip(name)
    paths = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(CHILD), name, json.dumps(CASES[name])],
        env={**os.environ, "PYTHONPATH": paths, "TF_CPP_MIN_LOG_LEVEL": "2"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return name, json.loads(done.stdout)


Answers = tuple[str, list[dict[str, Any]]]


def test_the_parts_have_torchs_names_images_and_bytes(answers: Answers) -> None:
    plain = answers[1][0]
    mine = [part[:4] for part in plain["parts"] if not part[4]]
    assert mine == [
        ["first call", 1, 7, 2 * ONE_WAY],
        ["copy to device", 2, 7, ONE_WAY],
        ["copy from device", 2, 7, ONE_WAY],
        ["copy only", 2, 7, 2 * ONE_WAY],
        ["end to end", 2, 7, 2 * ONE_WAY],
        ["convolution, cold cache", 2, 7, 2 * ONE_WAY],
        ["convolution, warm cache", 2, 7, 2 * ONE_WAY],
        ["resident loop", 2, 7, 2 * ONE_WAY],
    ]
    assert [part[0].split(",")[0] for part in plain["parts"] if part[4]] == [
        "scipy.signal.convolve2d",
        "scipy.ndimage.convolve",
    ]
    assert plain["device"] == "cpu:0, cpu:1"
    assert plain["samples"] == [7, 7]
    assert plain["first_step_ms"] > 0
    assert plain["peak_memory_bytes"] > 2**20


def test_every_way_that_runs_verified_itself_with_an_even_filter(answers: Answers) -> None:
    """An even filter's padding differs before and after; a wrong one would be a Mismatch."""
    name, found = answers
    wide = [one for (work, _), one in zip(CASES[name], found, strict=False) if work == WIDE]
    ran = [one for one in wide if "parts" in one]
    assert len(ran) == len(wide) - 1
    for one in ran:
        sizes = {part[0]: part[3] for part in one["parts"] if not part[4]}
        assert sizes["end to end"] == 2 * 3 * ONE_WAY


def test_a_copy_alone_convolves_nothing(answers: Answers) -> None:
    names = [part[0] for part in answers[1][2]["parts"]]
    assert names == ["first call", "copy to device", "copy from device", "copy only"]


def test_what_the_back_end_cannot_do_has_a_reason(answers: Answers) -> None:
    name, found = answers
    assert SAID[name] in found[len(CASES[name]) - 1]["unsupported"]


def test_a_filter_that_is_not_turned_is_found(answers: Answers) -> None:
    assert "differs from scipy's" in answers[1][-1]["mismatch"]
