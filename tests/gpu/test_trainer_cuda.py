"""A script that lets Hugging Face's Trainer train, on a real GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from nfold.ablation import Ablation
from nfold.explain import lines
from nfold.plan import Plan
from nfold.run.handoff import Folder
from nfold.run.options import Options
from nfold.run.run import run
from nfold.seen import Seen
from nfold.telemetry.inspection import inspect_machine
from nfold.workload import Workload

pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.integration,
    pytest.mark.timeout(300),
    pytest.mark.skipif(len(inspect_machine().gpus) < 1, reason="needs a GPU"),
]
ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "diagnosis" / "scripts" / "with_trainer.py"


def seen_under(tmp_path: Path, ablation: Ablation | None = None) -> Seen:
    plan = Plan(
        device="cuda",
        devices=1,
        cores_per_device=1,
        strategy="single",
        steps=30,
        warmup_steps=6,
    )
    host, options = inspect_machine(), Options(results=tmp_path)
    found = run(Workload.of_script(str(SCRIPT)), plan, ablation, machine=host, options=options)
    assert found.status == "ok", found.cause
    (seen,) = Folder(tmp_path / str(found.folder)).read_seen()
    return seen


def test_what_it_does_by_itself_is_told_in_its_own_words(tmp_path: Path) -> None:
    seen = seen_under(tmp_path)
    assert seen.trainer == "transformers"
    read = seen.first("host_sync")
    assert read is not None
    assert str(read.inside).startswith("transformers/trainer.py:")
    made = next(n for n, t in enumerate(SCRIPT.read_text().splitlines(), 1) if "told = " in t)
    told = lines.host_syncs(seen)
    assert "logging_nan_inf_filter=False" in told
    assert lines.workers(seen, 8).endswith(
        f"with_trainer.py:{made}: TrainingArguments(..., dataloader_num_workers=8)"
    )


def test_nobody_waits_for_the_losses_that_it_looks_at(tmp_path: Path) -> None:
    assert seen_under(tmp_path, Ablation(host_syncs=False)).steps == 30
