"""Models of many kinds with nfold.Run on one and two GPUs against plain PyTorch on one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from integration.scripts.user_models import BATCH, SAMPLES
from integration.test_user_run_models import EQUAL
from launched import launch
from nfold.telemetry.machine_inspection import inspect_machine

pytestmark = [pytest.mark.gpu, pytest.mark.integration, pytest.mark.timeout(400)]

HOST = inspect_machine()
SCRIPT = Path(__file__).parents[1] / "integration" / "scripts" / "user_models.py"
STEPS_PER_EPOCH = -(-SAMPLES // BATCH)
Case = dict[str, Any]
Cases = dict[str, Case]
Ends = list[dict[str, dict[str, Any]]]
FP32 = {"device": "cuda", "precision": "fp32", "layout": "channels_first", "input": "loader"}
SENSITIVE = ("lbfgs", "lbfgs_search", "rprop")  # to rounding
RESUMING: Case = {"training": "two_optimizers", "epochs": 6}


def with_plan(cases: Cases, **fields: Any) -> Cases:
    return {
        name: {**case, "plan": {**FP32, **case.get("plan", {}), **fields}}
        for name, case in cases.items()
    }


DROPOUT: Case = {"training": "dropout", "epochs": 8}
BY_USER: Case = {"training": "compiled", "backend": "inductor"}
EAGER = with_plan(
    {**{name: case for name, case in EQUAL.items() if name not in SENSITIVE}, "dropout": DROPOUT},
    step="eager",
)
HALF_NAMES = (
    *("outputs_tuple", "outputs_model_output", "outputs_attribute_dict", "outputs_object"),
    *("loss_in_tuple", "loss_attribute", "tied", "unfrozen_in_step_2", "lora", "dropout"),
    *("compiled", "compiled_by_method", "two_optimizers", "checkpointed"),
)
HALF = with_plan({name: {**EAGER[name], "epochs": 12} for name in HALF_NAMES}, precision="bf16")
COMPILED = with_plan(
    {
        "by_user": {**BY_USER, "method": False},
        "by_user_with_method": {**BY_USER, "method": True},
        "by_user_in_bf16": {
            **BY_USER,
            "method": False,
            "epochs": 12,
            "plan": {"precision": "bf16"},
        },
    },
    step="eager",
)
CAPTURED_NAMES = (
    *("outputs_tuple", "outputs_model_output", "outputs_object", "loss_attribute"),
    *("tied", "tied_models", "frozen", "lora", "two_optimizers", "closure", "unfrozen_in_parts"),
    *("gan", "gan_in_one_model", "gan_with_two_backwards"),
)
WITHIN_EPOCH = 4 * STEPS_PER_EPOCH + 2
# Whole batches are recorded in the first epoch, the last batches of epochs in the fourth.
CAPTURED = with_plan(
    {
        name: {**case, "run_step": True}
        for name, case in {
            **{name: {**EQUAL[name], "epochs": 8} for name in CAPTURED_NAMES},
            "unfrozen_in_epoch": {"training": "frozen", "unfreeze": WITHIN_EPOCH, "epochs": 10},
            "frozen_in_epoch": {"training": "frozen", "freeze": WITHIN_EPOCH, "epochs": 10},
            "dropout": {**DROPOUT, "epochs": 16},
            "uninterrupted": RESUMING,
            "stopped": {**RESUMING, "folder": "checkpoints", "stop": 9},
            "resumed": {**RESUMING, "folder": "checkpoints", "stop": 9},
        }.items()
    },
    step="captured",
)
# A read of the loss in the step; draws that are saved and restored; steps that the loss decides.
PERHAPS_CAPTURED = with_plan(
    {
        name: {**EQUAL[name], "epochs": 8, "run_step": True}
        for name in ("schedules", "checkpointed", "rprop", "lbfgs", "unfrozen_in_a_new_group")
    },
    step="captured",
)


def run_cases(folder: Path, cases: Cases, world: int, *flags: str) -> Ends:
    """Return what every rank ended with, by case."""
    if len(HOST.gpus) < world:
        pytest.skip(f"needs {world} GPUs")
    (folder / "cases.json").write_text(json.dumps(cases))
    launch(SCRIPT, world, str(folder / "cases.json"), str(folder), *flags)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]


def warnings_of(rank: dict[str, dict[str, Any]], name: str) -> list[str]:
    """Return nfold's warnings, not those of PyTorch."""
    texts = rank[name]["warnings"]
    return [text for text in texts if "next:" in text or "runs eagerly" in text]


def check_equal(ranks: Ends, name: str) -> None:
    for rank in ranks:
        assert "error" not in rank[name], rank[name]["error"]
        assert rank[name]["parameters"] == ranks[0][name]["parameters"], name


def check_like_plain(found: dict[str, Any], expected: dict[str, Any], case: Case) -> None:
    """Losses of micro-batches are not those of a step."""
    assert found["parameters"] == pytest.approx(expected["parameters"], abs=3e-3)
    assert found["steps"] == len(expected["losses"])
    if case["plan"].get("accumulate", 1) == 1:
        assert found["losses"] == pytest.approx(expected["losses"], abs=3e-3)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The ends of the same trainings in plain PyTorch on one GPU."""
    cases = {**EAGER, **COMPILED, **{f"captured_{n}": case for n, case in CAPTURED.items()}}
    cases = {name: case for name, case in cases.items() if "folder" not in case}
    (ends,) = run_cases(tmp_path_factory.mktemp("plain"), cases, 1, "--plain")
    return ends


@pytest.mark.parametrize("world", [1, 2])
def test_losses_and_weights_are_those_of_plain_pytorch(
    tmp_path: Path, plain: dict[str, dict[str, Any]], world: int
) -> None:
    ranks = run_cases(tmp_path, EAGER, world)
    for name, case in EAGER.items():
        check_equal(ranks, name)
        assert not any(warnings_of(rank, name) for rank in ranks), name
        if name != "dropout" or world == 1:
            check_like_plain(ranks[0][name], plain[name], case)


@pytest.mark.parametrize("world", [1, 2])
def test_ranks_stay_equal_in_bf16_and_the_loss_falls(tmp_path: Path, world: int) -> None:
    ranks = run_cases(tmp_path, HALF, world)
    for name in HALF:
        check_equal(ranks, name)
        losses = ranks[0][name]["losses"]
        assert sum(losses[-4:]) < 0.95 * sum(losses[:4]), name


@pytest.mark.parametrize("world", [1, 2])
def test_a_model_that_the_user_compiled_trains_as_it_did(
    tmp_path: Path, plain: dict[str, dict[str, Any]], world: int
) -> None:
    ranks = run_cases(tmp_path, COMPILED, world)
    for name, case in COMPILED.items():
        check_equal(ranks, name)
        if case["plan"]["precision"] == "fp32":
            check_like_plain(ranks[0][name], plain[name], case)
    losses = ranks[0]["by_user_in_bf16"]["losses"]
    assert sum(losses[-4:]) < 0.9 * sum(losses[:4])
    assert losses != pytest.approx(plain["by_user_in_bf16"]["losses"], abs=1e-6)


@pytest.mark.parametrize("world", [1, 2])
def test_a_captured_step_trains_as_plain_pytorch(
    tmp_path: Path, plain: dict[str, dict[str, Any]], world: int
) -> None:
    ranks = run_cases(tmp_path, CAPTURED, world)
    for name, case in CAPTURED.items():
        if name == "stopped":
            continue
        check_equal(ranks, name)
        found = ranks[0][name]
        assert not any(warnings_of(rank, name) for rank in ranks), name
        assert found["calls"] < found["steps"] - STEPS_PER_EPOCH, name
        if name not in ("dropout", "resumed"):
            check_like_plain(found, plain[f"captured_{name}"], case)
    losses = ranks[0]["dropout"]["losses"]
    assert sum(losses[-4:]) < 0.9 * sum(losses[:4])
    resumed, whole = ranks[0]["resumed"], ranks[0]["uninterrupted"]
    assert resumed["losses"] == pytest.approx(whole["losses"][9:], abs=1e-3)
    assert resumed["parameters"] == pytest.approx(whole["parameters"], abs=1e-3)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", PERHAPS_CAPTURED)
def test_a_step_is_captured_or_one_warning_says_why_not(
    tmp_path: Path, name: str, world: int
) -> None:
    ranks = run_cases(tmp_path, {name: PERHAPS_CAPTURED[name]}, world)
    check_equal(ranks, name)
    found = ranks[0][name]
    texts = [text for text in warnings_of(ranks[0], name) if "runs eagerly" in text]
    assert len(texts) == (found["calls"] >= found["steps"])
