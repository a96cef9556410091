"""Errors of the training itself, in unmodified scripts on two CPU devices."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from nfold.core.measurement import Measurement
from nfold.core.plan import Plan
from nfold.core.variant import Variant
from nfold.core.workload import Workload
from nfold.launch.handoff import HandoffFolder
from nfold.launch.launch_spec import RunOptions
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
    options = RunOptions(results=results)
    found = run(workload, plan, Variant(profiler_steps=True), machine=host, options=options)
    assert found.status == "ok", found.cause
    return found, HandoffFolder(results / str(found.folder))


@pytest.mark.parametrize(
    ("kind", "error", "text"),
    [
        ("thawed", PARAMETERS_DIFFER, "gradients of backbone are not exchanged"),
        ("initial", PARAMETERS_DIFFER, "initial weights of backbone.0 and head differ"),
        ("past-wrapper", PARAMETERS_DIFFER, "gradients were not exchanged"),
        ("repeated", REPEATED_SAMPLES, "the same samples 2 times"),
        ("same-batches", SAME_SAMPLES, "all ranks make the same random batches"),
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
        line = folder.read_profiles()[0].most_frequent_line("past_wrapper")
        number = (
            WRONG.read_text()
            .splitlines()
            .index("            loss = wrapped.module.loss(inputs, targets)")
        )
        assert str(line).endswith(f"{WRONG.name}:{number + 1}")


def test_ranks_with_data_of_their_own_are_healthy(tmp_path: Path) -> None:
    found, _ = probed(tmp_path, "own-data")
    assert not [one for one in found.warnings if one.kind in TRAINING_KINDS]
    assert data_sets_differ(found.ranks)


@pytest.mark.parametrize(
    ("kind", "places"),
    [
        ("leaves", ("rank 0 is in ", "rank 1 has left the training loop at {}:{break}")),
        ("evaluates", ("rank 0 is in forward ({}:{forward})", "rank 1 is in ")),
        ("skips", ("rank 0 is in ", "rank 1 is in all_reduce ({}:{all_reduce})")),
    ],
)
def test_ranks_out_of_step_are_reported_at_once(
    tmp_path: Path, kind: str, places: tuple[str, ...]
) -> None:
    lines = [line.strip() for line in OUT_OF_STEP.read_text().splitlines()]
    numbers = {
        "break": lines.index("break") + 1,
        "forward": len(lines) - lines[::-1].index("model(x)"),
        "all_reduce": lines.index("dist.all_reduce(torch.zeros(1))") + 1,
    }
    done = subprocess.run(
        [
            *(sys.executable, "-m", "nfold", "explain", str(OUT_OF_STEP), "--devices", "cpu:2"),
            *("--results", str(tmp_path), "--budget", "30s", "--hang-timeout", "10", "--", kind),
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
