"""Errors of the training itself, in unmodified scripts on two CPU devices."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from nfold.core.measurement import Measurement
from nfold.core.plan import Plan
from nfold.core.variant import Variant
from nfold.core.workload import Workload
from nfold.launch.handoff import HandoffFolder
from nfold.launch.training_checks import (
    AUGMENTED_COPIES,
    PARAMETERS_DIFFER,
    REPEATED_SAMPLES,
    SAME_ORDER,
    SAME_SAMPLES,
    TRAINING_KINDS,
    data_sets_differ,
)
from nfold.launch.workload_run import run
from nfold.telemetry.machine_inspection import inspect_machine
from repeated import repeated
from warm_runs import warm_options

pytestmark = pytest.mark.integration
WRONG = Path(__file__).parent / "scripts" / "wrong_training.py"
OUT_OF_STEP = Path(__file__).parent / "scripts" / "out_of_step.py"


def probed(results: Path, kind: str) -> tuple[Measurement, HandoffFolder]:
    """Return the measurement of a probe run on two devices, and its folder."""
    host = inspect_machine()
    if host.cores < 2:
        pytest.skip("a CPU device needs a core of its own")
    plan = Plan(
        device="cpu", devices=2, cores_per_device=1, strategy="ddp", steps=40, warmup_steps=10
    )
    workload = Workload.from_script(str(WRONG), kind)
    options = warm_options(results)
    found = run(workload, plan, Variant(profiler_steps=True), machine=host, options=options)
    assert found.status == "ok", found.cause
    return found, HandoffFolder(results / str(found.folder))


def line_number(script: Path, line: str) -> int:
    """Return the number of the first line with this text."""
    return [one.strip() for one in script.read_text().splitlines()].index(line) + 1


@pytest.mark.parametrize(
    ("kind", "error", "text"),
    [
        ("thawed", PARAMETERS_DIFFER, "gradients of backbone are not exchanged"),
        pytest.param(
            *("initial", PARAMETERS_DIFFER, "initial weights of backbone.0 and head differ"),
            marks=pytest.mark.slow,
        ),
        ("past-wrapper", PARAMETERS_DIFFER, "gradients were not exchanged"),
        pytest.param(
            "repeated", REPEATED_SAMPLES, "the same samples 2 times", marks=pytest.mark.slow
        ),
        pytest.param(
            *("same-batches", SAME_SAMPLES, "all ranks make the same random batches"),
            marks=pytest.mark.slow,
        ),
        ("one-order", SAME_ORDER, "sampler.set_epoch(epoch) is not called"),
        pytest.param(
            "views", AUGMENTED_COPIES, "each with its own augmentation", marks=pytest.mark.slow
        ),
    ],
)
def test_an_error_is_found_in_the_probe_run(
    tmp_path: Path, kind: str, error: str, text: str
) -> None:
    found, folder = probed(tmp_path, kind)
    (caveat,) = (one for one in found.warnings if one.kind in TRAINING_KINDS)
    assert caveat.kind == error
    assert text in caveat.text
    if kind == "past-wrapper":
        line = folder.reports.read_profiles()[0].most_frequent_line("past_wrapper")
        number = line_number(WRONG, "loss = wrapped.module.loss(inputs, targets)")
        assert str(line).endswith(f"{WRONG.name}:{number}")


def test_ranks_with_data_of_their_own_are_healthy(tmp_path: Path) -> None:
    found, _ = probed(tmp_path, "own-data")
    assert not [one for one in found.warnings if one.kind in TRAINING_KINDS]
    assert data_sets_differ(found.ranks)


def test_who_binds_all_ranks_to_one_core_is_recorded(tmp_path: Path) -> None:
    _, folder = probed(tmp_path, "bound")
    first, second = folder.reports.read_profiles()
    assert first.core_ids == second.core_ids
    assert len(first.core_ids) == 1
    number = line_number(WRONG, "os.sched_setaffinity(0, {first_core})")
    assert str(first.most_frequent_line("affinity")).endswith(f"{WRONG.name}:{number}")


@pytest.mark.slow(parts=8)
@pytest.mark.parametrize(
    ("kind", "places"),
    [
        ("leaves", ("rank 0 is in ", "rank 1 has left its training loop at {}:{break}")),
        # Which of its collectives meets which of rank 1 is chance.
        ("evaluates", ("rank 0 is in ", "rank 1 is in ")),
        ("skips", ("rank 0 is in ", "rank 1 is in all_reduce ({}:{all_reduce})")),
    ],
)
@repeated  # gloo may abort a rank before the places of all ranks are known: it is then tried again
def test_ranks_out_of_step_are_reported_at_once(
    tmp_path: Path, kind: str, places: tuple[str, ...]
) -> None:
    numbers = {
        "break": line_number(OUT_OF_STEP, "break"),
        "all_reduce": line_number(OUT_OF_STEP, "dist.all_reduce(torch.zeros(1))"),
    }
    done = subprocess.run(
        [
            *(sys.executable, "-m", "nfold", "explain", str(OUT_OF_STEP), "--devices", "cpu:2"),
            *(
                "--results",
                tempfile.mkdtemp(dir=tmp_path),
                "--budget",
                "120s",
                "--hang-timeout",
                "10",
                "--",
                kind,
            ),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    # The run may have had enough steps for an account of the time before it ended.
    said = " ".join((done.stdout if done.returncode == 0 else done.stderr).split())
    said = said.replace("tests/integration/scripts/", "")
    assert "rong training: ranks are out of step" in said
    for place in places:
        assert place.format(OUT_OF_STEP.name, **numbers) in said
    # It was not tried again.
    assert done.stderr.count("2 devices: ") <= 1
