"""Sharded optimizer state on 1, 2 and 3 CPU devices against whole state."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launched import RunsByWorld, launch

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow("sharded state", parts=6),
    pytest.mark.timeout(240),
]

SCRIPT = Path(__file__).parent / "scripts" / "sharded_state.py"
WORLDS = (1, 2, pytest.param(3, marks=pytest.mark.slow("sharded state on 3 devices")))
TRAININGS: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": "sgd"},
    "adam": {"optimizer": "adam"},
    "adamw": {"optimizer": "adamw"},
    "fused": {"optimizer": "fused"},
    "several": {"several": True},
    "accumulate": {"plan": {"accumulate": 3}},
    "small_messages": {"message_bytes": 100},
}
SHARDED: dict[str, Any] = {"optimizer_state": "sharded"}
CASES = TRAININGS | {
    f"{name}_sharded": {**case, "plan": {**case.get("plan", {}), **SHARDED}}
    for name, case in TRAININGS.items()
}
RESUMED: dict[str, dict[str, Any]] = {
    "sharded_from_sharded": {"plan": SHARDED, "from": "adamw_sharded"},
    "sharded_from_whole": {"plan": SHARDED, "from": "adamw"},
    "whole_from_sharded": {"from": "adamw_sharded"},
    "several_from_sharded": {"several": True, "plan": SHARDED, "from": "several_sharded"},
}

Found = dict[tuple[str, int], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sharded")


def run_cases(cases: dict[str, Any], folder: Path, world: int, *arguments: str) -> Found:
    folder.mkdir()
    (folder / "cases.json").write_text(json.dumps(cases))
    launch(SCRIPT, world, str(folder / "cases.json"), str(folder), *arguments)
    return {
        (case, world): [
            json.loads((folder / f"{case}-{rank}.json").read_text()) for rank in range(world)
        ]
        for case in cases
    }


@pytest.fixture(scope="module")
def found(folder: Path) -> Found:
    """What every rank of every case ended with, by (case, world)."""
    return RunsByWorld(lambda world: run_cases(CASES, folder / str(world), world))


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("case", TRAININGS)
def test_parameters_are_equal_to_the_last_bit(found: Found, case: str, world: int) -> None:
    expected = found[case, world][0]["parameters"]
    for rank in found[f"{case}_sharded", world]:
        assert rank["parameters"] == expected
        assert rank["kept_gradients"]
        assert rank["steps"] == 16


@pytest.mark.parametrize("world", WORLDS[1:])
@pytest.mark.parametrize("case", TRAININGS)
def test_each_rank_holds_its_part_of_the_state(found: Found, case: str, world: int) -> None:
    whole = [sum(rank["state_bytes"]) for rank in found[case, world]]
    parts = [sum(rank["state_bytes"]) for rank in found[f"{case}_sharded", world]]
    assert set(whole) == {sum(parts)}
    assert max(parts) < 1.3 * sum(parts) / (2 if world == 2 else 1.8)  # one layer is over a half


@pytest.mark.parametrize("world", WORLDS)
def test_checkpoints_of_either_kind_continue_as_without_an_interruption(
    found: Found, folder: Path, world: int
) -> None:
    _ = found["adamw", world]
    resumed = run_cases(RESUMED, folder / f"{world}-resumed", world, str(folder / str(world)))
    for (case, _), ranks in resumed.items():
        expected = found["several" if case == "several_from_sharded" else "adamw", world]
        sharded = "plan" in RESUMED[case] and world > 1
        for rank, other in zip(ranks, expected, strict=True):
            assert rank["parameters"] == other["parameters"], case
            assert (rank["state_bytes"] < other["state_bytes"]) == sharded


@pytest.mark.parametrize(("written", "read"), [pytest.param(3, 2, marks=pytest.mark.slow), (2, 1)])
def test_a_checkpoint_is_read_on_another_number_of_devices(
    found: Found, folder: Path, written: int, read: int
) -> None:
    """Parameters differ by rounding only: gradients are added in another order."""
    name, _ = f"{written}-on-{read}", found["adamw", written]
    resumed = run_cases(RESUMED, folder / name, read, str(folder / str(written)))
    for (case, _), ranks in resumed.items():
        expected = found["several" if case == "several_from_sharded" else "adamw", written][0]
        for rank in ranks:
            assert rank["parameters"] == pytest.approx(expected["parameters"], abs=1e-3), case
            assert rank["parameters"] == ranks[0]["parameters"]
