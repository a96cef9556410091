"""nfold.Run on GPUs: memory "fit" with an almost full GPU, and sharded optimizer state."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from launched import launch

pytestmark = [pytest.mark.gpu, pytest.mark.integration, pytest.mark.timeout(400)]
GPUS = torch.cuda.device_count()
SCRIPT = Path(__file__).parent / "scripts" / "memory_of_steps.py"
SHARDED_SCRIPT = Path(__file__).parents[1] / "integration" / "scripts" / "sharded_state.py"
FIT: dict[str, Any] = {"plan": {"memory": "fit"}, "full": True}
MEMORY_CASES: dict[str, dict[str, Any]] = {
    "reference": {"place": "forward"},
    "forward": {"place": "forward", **FIT},
    "backward": {"place": "backward", **FIT},
    "captured": {"place": "forward", **FIT, "plan": {"memory": "fit", "step": "captured"}},
}


def run_cases(
    script: Path, cases: dict[str, Any], folder: Path, world: int
) -> dict[str, list[dict[str, Any]]]:
    if world > GPUS:
        pytest.skip(f"needs {world} GPUs")
    (folder / "cases.json").write_text(json.dumps(cases))
    launch(script, world, str(folder / "cases.json"), str(folder))
    return {
        case: [json.loads((folder / f"{case}-{rank}.json").read_text()) for rank in range(world)]
        for case in cases
    }


@pytest.mark.alone
@pytest.mark.parametrize("world", [1, 2])
def test_a_gpu_without_memory_halves_the_micro_batches_of_all(tmp_path: Path, world: int) -> None:
    found = run_cases(SCRIPT, MEMORY_CASES, tmp_path, world)
    expected = found["reference"][0]
    for case in ("forward", "backward", "captured"):
        first, *_ = ranks = found[case]
        *others, last = [rank["ooms"] for rank in ranks]
        assert last >= 1
        assert not any(others)
        (chosen,) = re.findall(r"accumulate=(\d+)", first["printed"])
        assert int(chosen) >= 4 // world
        for rank in ranks:
            assert rank["parameters"] == first["parameters"]
            assert rank["steps"] == expected["steps"]
            assert rank["losses"] == pytest.approx(expected["losses"], abs=1e-4)
            assert rank["parameters"] == pytest.approx(expected["parameters"], abs=1e-4)


@pytest.mark.parametrize("optimizer", ["adamw", "fused"])
@pytest.mark.parametrize("step", ["eager", "captured"])
def test_sharded_state_changes_no_parameter(tmp_path: Path, optimizer: str, step: str) -> None:
    plan = {"device": "cuda", "step": step}
    cases = {
        "whole": {"optimizer": optimizer, "plan": plan},
        "sharded": {"optimizer": optimizer, "plan": {**plan, "optimizer_state": "sharded"}},
    }
    found = run_cases(SHARDED_SCRIPT, cases, tmp_path, 2)
    whole, sharded = found["whole"], found["sharded"]
    for rank in sharded:
        assert rank["parameters"] == sharded[0]["parameters"]
        assert rank["parameters"] == pytest.approx(whole[0]["parameters"], abs=1e-6)
        assert rank["kept_gradients"]
    assert sum(rank["state_bytes"][0] for rank in sharded) == whole[0]["state_bytes"][0]
    assert max(rank["state_bytes"][0] for rank in sharded) < 0.7 * whole[0]["state_bytes"][0]
