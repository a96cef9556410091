"""Models of many kinds with nfold.Run on 1, 2 and 3 CPU devices against plain PyTorch on one."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from integration.scripts.user_models import OUTPUTS, OneDevice, train
from launched import RunsByWorld, launch

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

SCRIPT = Path(__file__).parent / "scripts" / "user_models.py"
ONE_DEVICE = pytest.mark.slow("models on 1 device", parts=6)
THREE_DEVICES = pytest.mark.slow("models on 3 devices")
WORLDS = (pytest.param(1, marks=ONE_DEVICE), 2, pytest.param(3, marks=THREE_DEVICES))
PARTS = {"accumulate": 2}
LBFGS = {"training": "plain", "optimizer": "LBFGS", "closure": True, "batch": 37, "epochs": 4}
WITHIN = {"lbfgs_search": 1e-3}  # rounding changes the length of its steps
TWO_OPTIMIZERS = {"training": "two_optimizers", "dropout": 0.3}
RESUMED: dict[str, dict[str, Any]] = {
    "dropout": {**TWO_OPTIMIZERS, "dataset": True},
    "in_parts": {**TWO_OPTIMIZERS, "plan": PARTS},
    "gan": {"training": "gan", "switch": True},
    "tied": {"training": "tied"},
    "schedules": {"training": "schedules"},
}
EQUAL: dict[str, dict[str, Any]] = {
    **{f"outputs_{name}": {"training": "several_inputs", "outputs": name} for name in OUTPUTS},
    "loss_in_tuple": {"training": "own_loss", "attribute": False},
    "loss_attribute": {"training": "own_loss", "attribute": True},
    "tied": {"training": "tied"},
    "tied_in_parts": {"training": "tied", "plan": PARTS},
    "tied_models": {"training": "tied_models"},
    "frozen": {"training": "frozen"},
    "frozen_not_in_optimizer": {"training": "frozen", "only_trained": True},
    "frozen_in_step_3": {"training": "frozen", "freeze": 3},
    "frozen_in_parts": {"training": "frozen", "freeze": 3, "plan": PARTS},
    "unfrozen_in_epoch_2": {"training": "frozen", "unfreeze": "epoch", "epochs": 3},
    "unfrozen_in_step_2": {"training": "frozen", "unfreeze": 2},
    "unfrozen_in_a_new_group": {"training": "frozen", "unfreeze": 2, "only_trained": True},
    "unfrozen_in_parts": {"training": "frozen", "unfreeze": 2, "plan": PARTS},
    "whole_model_unfrozen": {"training": "frozen", "unfreeze": 0, "whole": True},
    "compiled": {"training": "compiled", "method": False},
    "compiled_by_method": {"training": "compiled", "method": True},
    "lora": {"training": "lora"},
    "lora_prepared_again": {"training": "lora", "late": "again"},
    "two_optimizers": {"training": "two_optimizers"},
    "two_optimizers_in_parts": {"training": "two_optimizers", "plan": PARTS},
    "gan": {"training": "gan", "switch": True},
    "gan_in_one_model": {"training": "gan", "switch": True, "joint": True},
    "gan_with_two_backwards": {"training": "gan", "switch": False},
    "schedules": {"training": "schedules", "epochs": 4},
    "rprop": {"training": "plain", "optimizer": "Rprop"},
    "closure": {"training": "plain", "closure": True},
    "lbfgs": LBFGS,
    "lbfgs_search": {**LBFGS, "line_search": "strong_wolfe", "epochs": 2},
    "checkpointed": {"training": "checkpointed", "reentrant": False, "shared": True},
    "checkpointed_reentrant": {"training": "checkpointed", "reentrant": True, "shared": False},
    "batch_of_two": {"training": "plain", "batch": 2},
}
CASES: dict[str, dict[str, Any]] = {
    **EQUAL,
    "dropout": {"training": "dropout", "epochs": 8},
    **{
        f"{part}_{name}": {**case, "epochs": 3, **settings}
        for name, case in RESUMED.items()
        for part, settings in (
            ("whole", {}),
            ("stopped", {"folder": name, "stop": 5}),
            ("resumed", {"folder": name, "stop": 5}),
        )
    },
    "reentrant_shared": {"training": "checkpointed", "reentrant": True, "shared": True},
    "lora_later": {"training": "lora", "late": "only"},
    "not_prepared": {"training": "not_prepared"},
    "lbfgs_in_parts": {**LBFGS, "plan": PARTS},
}
DIVERGING = ("lora_later", "not_prepared")
ENDING_EARLY = (*(f"stopped_{name}" for name in RESUMED), "reentrant_shared", "lbfgs_in_parts")
Found = dict[int, list[dict[str, dict[str, Any]]]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What every rank of each world ended with, by case."""

    def run(world: int) -> Found:
        folder = tmp_path_factory.mktemp(f"world-{world}")
        (folder / "cases.json").write_text(json.dumps(CASES))
        launch(SCRIPT, world, str(folder / "cases.json"), str(folder))
        return {world: [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]}

    return RunsByWorld(run)


@functools.cache
def reference(name: str) -> dict[str, Any]:
    return train(CASES[name], OneDevice())


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("case", EQUAL)
def test_losses_and_weights_are_those_of_plain_pytorch(found: Found, case: str, world: int) -> None:
    expected, within = reference(case), WITHIN.get(case, 2e-5)
    for rank in found[world]:
        one = rank[case]
        assert one["parameters"] == pytest.approx(expected["parameters"], abs=within)
        assert one["steps"] == len(expected["losses"])
        if "plan" not in CASES[case]:
            assert one["losses"] == pytest.approx(expected["losses"], abs=within)
        assert one["warnings"] == []


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("case", [one for one in CASES if one not in (*DIVERGING, *ENDING_EARLY)])
def test_every_rank_ends_with_the_same_weights(found: Found, case: str, world: int) -> None:
    first, *others = [rank[case]["parameters"] for rank in found[world]]
    assert all(other == first for other in others)


@ONE_DEVICE
def test_dropout_on_one_device_draws_as_in_plain_pytorch(found: Found) -> None:
    for case in ("dropout", "whole_dropout"):
        expected = reference(case)
        assert found[1][0][case]["losses"] == pytest.approx(expected["losses"], abs=2e-5)


@pytest.mark.parametrize("world", WORLDS)
def test_the_loss_falls_with_dropout(found: Found, world: int) -> None:
    losses = found[world][0]["dropout"]["losses"]
    assert sum(losses[-4:]) < 0.8 * sum(losses[:4])


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("case", RESUMED)
def test_an_epoch_is_resumed_as_without_the_interruption(
    found: Found, case: str, world: int
) -> None:
    for rank in found[world]:
        resumed, whole = rank[f"resumed_{case}"], rank[f"whole_{case}"]
        assert len(resumed["losses"]) == 7 * (2 if "plan" in RESUMED[case] else 1)
        assert resumed["losses"] == whole["losses"][-len(resumed["losses"]) :]
        assert resumed["parameters"] == whole["parameters"]


@pytest.mark.parametrize("world", WORLDS[1:])
def test_a_module_that_is_checkpointed_twice_reentrantly_is_refused(
    found: Found, world: int
) -> None:
    for rank in found[world]:
        assert (
            "next: torch.utils.checkpoint(..., use_reentrant=False)"
            in (rank["reentrant_shared"]["error"])
        )


@ONE_DEVICE
def test_on_one_device_it_may_be_checkpointed_twice_reentrantly(found: Found) -> None:
    alone = found[1][0]["reentrant_shared"]
    assert alone["losses"] == pytest.approx(reference("reentrant_shared")["losses"], abs=2e-5)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("case", DIVERGING)
def test_rank_0_warns_once_of_parameters_that_were_not_prepared(
    found: Found, case: str, world: int
) -> None:
    first, *others = [rank[case]["warnings"] for rank in found[world]]
    (warning,) = first
    assert "parameters of no prepared model" in warning
    assert "next: run.prepare(module)" in warning
    assert not any(others)


@pytest.mark.parametrize("world", WORLDS)
def test_a_loss_that_is_computed_several_times_needs_the_whole_batch(
    found: Found, world: int
) -> None:
    for rank in found[world]:
        assert "next: accumulate=1" in rank["lbfgs_in_parts"]["error"]
