"""Allocator retries on a full GPU are counted, and expandable segments avoid them."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest

from nfold.core.plan import Plan
from nfold.core.variant import Variant
from nfold.core.workload import Workload
from nfold.launch.handoff import HandoffFolder
from nfold.launch.launch_spec import RunOptions
from nfold.launch.workload_run import run
from nfold.telemetry.machine_inspection import inspect_machine

HOST = inspect_machine()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.integration,
    pytest.mark.timeout(300),
    pytest.mark.skipif(len(HOST.gpus) < 1, reason="needs a GPU"),
]
SCRIPT = str(Path(__file__).parent / "scripts" / "growing_allocations.py")


def _retries_and_step_ms(
    tmp_path: Path, variant: Variant | None, count: int
) -> tuple[float, float]:
    plan = Plan(
        device="cuda", devices=1, strategy="single", cores_per_device=1, steps=30, warmup_steps=10
    )
    workload = Workload.from_script(SCRIPT, str(count))
    found = run(workload, plan, variant, machine=HOST, options=RunOptions(results=tmp_path))
    assert found.status == "ok", found.cause
    (seen,) = HandoffFolder(tmp_path / str(found.folder)).reports.read_profiles()
    return seen.alloc_retries, median(found.ranks[0].step_ms)


@pytest.mark.alone
def test_retries_are_seen_and_go_with_segments_that_grow(tmp_path: Path) -> None:
    healthy, calm_ms = _retries_and_step_ms(tmp_path, None, 0)
    retries, slow_ms = _retries_and_step_ms(tmp_path, None, 2)
    left, growing_ms = _retries_and_step_ms(tmp_path, Variant(expandable_segments=True), 2)
    assert healthy == 0
    assert retries == pytest.approx(2, abs=0.5)
    assert left < 0.1
    assert calm_ms < slow_ms
    assert growing_ms < slow_ms
