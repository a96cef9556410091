"""Remedies of an unmodified script in real processes on two CPU devices."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from integration.scripts.remedied import MARK
from nfold.core.plan import Plan
from nfold.core.script_profile import ScriptProfile
from nfold.core.source_edit import SourceEdit
from nfold.core.variant import Variant
from nfold.core.workload import Workload
from nfold.interventions.execution.garbage_collection_frozen import FULL_COLLECTION_INTERVAL
from nfold.launch.handoff import HandoffFolder
from nfold.launch.workload_run import run
from nfold.telemetry.machine_inspection import inspect_machine
from nfold.tune.source_patch import make_patch
from warm_runs import warm_options

pytestmark = pytest.mark.integration
SCRIPT = Path(__file__).parent / "scripts" / "remedied.py"
MIB = 1 << 20
REMEDIES = Variant(
    loader_persistent_workers=True,
    loader_prefetch_factor=4,
    loader_in_order=False,  # of one worker: the order stays
    ddp_static_graph=True,
    ddp_bucket_mb=1,
    fused_optimizer=True,
    set_grads_to_none=True,
    garbage_collection_frozen=True,
)
ORIGINAL = {
    "persistent_workers": False,
    "prefetch_factor": 2,
    "in_order": True,
    "static_graph": False,
    "bucket_bytes": 25 * MIB,
    "fused": None,
    "deleted": False,
}
CHANGED = {
    "persistent_workers": True,
    "prefetch_factor": 4,
    "in_order": False,
    "static_graph": True,
    "bucket_bytes": MIB,
    "fused": True,
    "deleted": True,
}


def measured(
    folder: Path, variant: Variant, script: Path = SCRIPT
) -> tuple[list[dict[str, Any]], ScriptProfile]:
    """Run the script; return the facts that each rank prints, and the profile of rank 0."""
    host = inspect_machine()
    if host.cores < 2:
        pytest.skip("a CPU device needs a core of its own")
    plan = Plan(
        device="cpu", devices=2, cores_per_device=1, steps=20, warmup_steps=4, strategy="ddp"
    )
    workload = Workload.from_script(str(script))
    found = run(workload, plan, variant, machine=host, options=warm_options(folder))
    assert found.status == "ok", found.cause
    assert found.folder is not None
    handoff = HandoffFolder(folder / found.folder)
    lines = [handoff.rank_log(rank).read_text().splitlines() for rank in range(2)]
    facts = [next(line for line in own if line.startswith(MARK)) for own in lines]
    return [json.loads(fact.removeprefix(MARK)) for fact in facts], handoff.reports.read_profiles()[
        0
    ]


@pytest.mark.slow
def test_remedies_change_a_script_and_train_it_as_before(tmp_path: Path) -> None:
    before, profile = measured(tmp_path, Variant())
    after, _ = measured(tmp_path, REMEDIES)
    for old, new in zip(before, after, strict=True):
        assert old["loss"] == pytest.approx(new["loss"], rel=1e-4)
        assert {name: old[name] for name in ORIGINAL} == ORIGINAL
        assert {name: new[name] for name in CHANGED} == CHANGED
        assert new["full_collections"] == FULL_COLLECTION_INTERVAL != old["full_collections"]
    edits: list[SourceEdit] = []
    for each, value in REMEDIES.interventions():
        assert each.is_useful(profile) or each.name == "loader_in_order", each.name
        own = each.source_edits(value, profile)
        assert own, each.name
        edits += own
    patch = make_patch(edits, Path.cwd())
    assert not patch.refusals
    assert not patch.flags
    assert len(patch.edits) == len(edits)


@pytest.mark.slow
def test_the_plan_of_nfold_run_has_other_fields(tmp_path: Path) -> None:
    script = SCRIPT.parent / "tuned" / "with_run.py"
    fields = (("precision", "bf16"), ("exchange", "bf16"))
    facts, profile = measured(tmp_path, Variant(run_plan=fields), script)
    assert facts == [dict(fields), dict(fields)]
    edits = Variant.run_plan.source_edits(fields, profile)
    assert edits
    patch = make_patch(list(edits), Path.cwd())
    assert not patch.refusals
    assert b'nfold.Run(precision="bf16", exchange="bf16")' in patch.files[0].edited


@pytest.mark.slow
def test_ranks_keep_the_cores_of_their_start(tmp_path: Path) -> None:
    script = SCRIPT.parent / "tuned" / "bound.py"
    before, profile = measured(tmp_path, Variant(), script)
    assert before == [{"cores": [0]}, {"cores": [0]}]
    assert profile.shared_cores == 0  # of one rank; the probe compares all ranks
    assert Variant.restored_affinity.is_useful(profile)
    after, _ = measured(tmp_path, Variant(restored_affinity=True), script)
    first, second = sorted(os.sched_getaffinity(0))[:2]
    assert after == [{"cores": [first]}, {"cores": [second]}]
