"""RANK and WORLD_SIZE of the environment: a job, no job, or a clear refusal."""

from __future__ import annotations

import subprocess
import sys

import pytest

from nfold.core.errors import MachineUnfit
from nfold.launch.workload_run import external_rank, external_world_size, in_external_job


@pytest.mark.parametrize(
    ("environment", "value"),
    [
        ({"RANK": "y"}, "RANK='y'"),
        ({"RANK": "y", "WORLD_SIZE": "2"}, "RANK='y'"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK='-1'"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE='0'"),
        ({"RANK": "1"}, "without WORLD_SIZE"),
        ({"WORLD_SIZE": "2"}, "without RANK"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "allowed are 0 to 1"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "without MASTER_ADDR"),
    ],
)
def test_what_names_no_rank_of_a_job_is_refused(
    environment: dict[str, str], value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in environment.items():
        monkeypatch.setenv(name, text)
    with pytest.raises(MachineUnfit, match="next: unset RANK WORLD_SIZE") as refusal:
        in_external_job()
    assert value in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "environment",
    [
        {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"},
        {"RANK": "0", "WORLD_SIZE": "1"},
    ],
)
def test_a_rank_of_a_job(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert not in_external_job()
    assert (external_rank(), external_world_size()) == (0, 1)
    for name, text in environment.items():
        monkeypatch.setenv(name, text)
    assert in_external_job()
    assert (str(external_rank()), str(external_world_size())) == (
        environment["RANK"],
        environment["WORLD_SIZE"],
    )


def test_commands_exit_with_4_and_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    command = [sys.executable, "-m", "nfold", "bench", "digits", "--dry-run"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 4
    assert done.stderr.startswith("nfold: error: RANK=1 in the environment without WORLD_SIZE")
    assert len(done.stderr.splitlines()) == 1
