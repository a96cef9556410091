"""The automatic plan of a script on GPUs: the same training, a choice that is kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from launched import launch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.integration,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
SCRIPT = Path(__file__).parent / "scripts" / "automatic_training.py"
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.mark.parametrize("decorated", [False, True], ids=["loop", "decorated"])
@pytest.mark.parametrize("world", [1, pytest.param(2, marks=two_gpus)])
def test_a_chosen_plan_trains_as_a_safe_one_and_is_reused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world: int, decorated: bool
) -> None:
    monkeypatch.setenv("NFOLD_CACHE", str(tmp_path / "cache"))
    found = []
    for name, plan in (("safe", "safe"), ("first", ""), ("again", "")):
        launch(SCRIPT, world, str(tmp_path / name), plan, str(int(decorated)))
        ranks = [
            json.loads((tmp_path / f"{name}-{rank}.json").read_text()) for rank in range(world)
        ]
        assert all(rank["parameters"] == ranks[0]["parameters"] for rank in ranks)
        assert all(rank["losses"][-1] < rank["losses"][0] for rank in ranks)
        found.append(ranks)
    safe, first, again = found
    for rank in range(world):
        assert first[rank]["samples"] == safe[rank]["samples"]
        assert first[rank]["losses"][:12] == pytest.approx(safe[rank]["losses"][:12], rel=1e-3)
        assert first[rank]["losses"] == pytest.approx(safe[rank]["losses"], rel=0.2, abs=0.02)
    (choice,) = (tmp_path / "cache" / "plans").iterdir()
    fields = json.loads(choice.read_text())["fields"]
    assert fields == again[0]["step"]
    assert not first[0]["choosing"]
