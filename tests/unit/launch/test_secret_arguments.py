from __future__ import annotations

from pathlib import Path

import pytest

from made import machine
from nfold.core.plan import Plan
from nfold.core.workload import Workload
from nfold.launch.launch_spec import RunOptions
from nfold.launch.workload_run import run
from nfold.store.store import Store


def test_a_rank_gets_secrets_that_are_nowhere_in_the_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("import sys; sys.exit(sys.argv[2] != 's3cret')")
    workload = Workload.from_script("train.py", "--api-token", "s3cret")
    plan = Plan(
        device="cpu", devices=1, cores_per_device=1, strategy="single", steps=5, warmup_steps=1
    )
    results = tmp_path / "results"
    found = run(workload, plan, machine=machine(), options=RunOptions(results=results))
    assert found.cause is not None
    assert "never imported torch" in found.cause.text
    with Store.open(results) as store:
        store.append(found)
        assert store.measurements()[0].workload.script == ("train.py", "--api-token", "***")
        assert store.find(found.cell, 0) is not None
    files = [file for file in results.rglob("*") if file.is_file()]
    assert len(files) > 3
    assert not [file for file in files if b"s3cret" in file.read_bytes()]
