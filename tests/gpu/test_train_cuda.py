"""``nfold train`` on GPUs: a resumed training ends as one without the interruption."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from made import plan
from nfold.analysis.cells import epochs
from nfold.core.measurement import Measurement
from nfold.core.workload import Workload
from nfold.engines.checkpoint_folder import newest_checkpoint
from nfold.launch.launch_spec import RunOptions, RunProgress, StopRequest
from nfold.launch.workload_run import run
from nfold.telemetry.machine_inspection import inspect_machine

pytestmark = [pytest.mark.gpu, pytest.mark.integration, pytest.mark.timeout(300)]
HOST = inspect_machine()
EPOCHS = 60
CASES: list[tuple[int, dict[str, object]]] = [
    (1, {"precision": "fp16"}),
    (1, {"precision": "fp16", "step": "captured", "accumulate": 2}),
    (2, {"precision": "fp16", "strategy": "ddp"}),
    (2, {"precision": "fp32", "strategy": "dp"}),
    (2, {"precision": "bf16", "strategy": "nfold"}),
]


def _train(
    folder: Path, devices: int, overrides: dict[str, object], *, stop_after: int | None
) -> Measurement:
    """Train into ``folder``, asked to stop once ``stop_after`` epochs are kept."""
    requested = plan(
        HOST,
        device="cuda",
        devices=devices,
        batch=64,
        epochs=EPOCHS,
        input="resident",
        **overrides,
    )
    stop, checkpoints = StopRequest(), folder / "checkpoints"

    def watch(_: RunProgress) -> None:
        kept = newest_checkpoint(checkpoints)
        if stop_after is not None and kept is not None and _epochs_of(kept) >= stop_after:
            stop.signum = signal.SIGINT

    options = RunOptions(
        results=folder, on_progress=watch, stop=stop, checkpoint_folder=checkpoints
    )
    return run(Workload.parse("digits"), requested, machine=HOST, options=options)


def _epochs_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-")) // 23


@pytest.mark.parametrize(("devices", "overrides"), CASES, ids=str)
def test_resume_ends_as_the_uninterrupted_run(
    tmp_path: Path, devices: int, overrides: dict[str, object]
) -> None:
    if len(HOST.gpus) < devices:
        pytest.skip(f"needs {devices} GPUs")
    whole = _train(tmp_path / "whole", devices, overrides, stop_after=None)
    assert whole.status == "ok", whole.cause
    broken = _train(tmp_path / "broken", devices, overrides, stop_after=5)
    rest = _train(tmp_path / "broken", devices, overrides, stop_after=None)
    assert broken.status == "interrupted"
    assert rest.status == "ok", rest.cause
    assert len(epochs(rest)) == EPOCHS
    for first, second in list(zip(epochs(whole), epochs(rest), strict=True))[:8]:
        assert second.train_loss == pytest.approx(first.train_loss, rel=2e-2, abs=5e-3)
    assert rest.ranks[0].sample_hashes == whole.ranks[0].sample_hashes
