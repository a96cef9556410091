"""Memory "fit" on 1, 2 and 3 CPU devices: ranks run out of memory, and the numbers stay the same."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from integration.scripts.own_model import Net, made
from launched import RunsByWorld, launch
from nfold.engines.sampling import epoch_order

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow("fitted steps", parts=6),
    pytest.mark.timeout(240),
]

SCRIPT = Path(__file__).parent / "scripts" / "fitted_steps.py"
WORLDS = (1, 2, pytest.param(3, marks=pytest.mark.slow("fitted steps on 3 devices")))
LAST = -1  # rank
CASES: dict[str, dict[str, Any]] = {
    "always_fits": {"rows": 10},
    "one_rank": {"rows": 2, "rank": LAST},
    "all_ranks": {"rows": 2},
    "in_backward": {"rows": 2, "rank": LAST, "place": "backward"},
    "in_second_step": {"rows": 2, "rank": LAST, "first": 1},
    "while_timed": {"rows": 1, "rank": LAST, "first": 5},
    "after_the_choice": {
        "rows": 1,
        "rank": LAST,
        "first": 17,
        "place": "backward",
        "factors": [1],  # the fastest might be one of parts that are small enough
    },
    "once": {"rows": 2, "rank": LAST, "last": 1},
    "several_models": {"rows": 2, "rank": LAST, "several_models": True},
    "without_backward": {"rows": 2, "rank": LAST, "place": "evaluation"},
    "one_left": {"rows": 2, "rank": LAST, "batch": 12},
    "bf16_exchange": {"rows": 2, "rank": LAST, "place": "backward", "plan": {"exchange": "bf16"}},
    "accumulate": {"rows": 1, "rank": LAST, "plan": {"accumulate": 2}},
    "sharded": {"rows": 2, "rank": LAST, "plan": {"optimizer_state": "sharded"}},
    "one_sample": {"rows": 0, "rank": LAST},
    "too_late": {"rows": 0, "rank": LAST, "place": "clip", "ends": True},
}
FAILED = ("one_sample", "too_late")
FITTED = [case for case in CASES if case not in FAILED]

Found = dict[tuple[str, int], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What every rank of every case ended with, by (case, world)."""

    def run(world: int) -> Found:
        folder = tmp_path_factory.mktemp(f"fitted-{world}")
        (folder / "cases.json").write_text(json.dumps(CASES))
        launch(SCRIPT, world, str(folder / "cases.json"), str(folder))
        return {
            (case, world): [
                json.loads((folder / f"{case}-{rank}.json").read_text()) for rank in range(world)
            ]
            for case in CASES
        }

    return RunsByWorld(run)


def one_device(batch: int) -> tuple[Tensor, list[float]]:
    """The parameters and the loss of every step of the same training without nfold."""
    losses: list[float] = []
    torch.manual_seed(3)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    x, y = made()
    for epoch in range(5):
        ids = torch.from_numpy(epoch_order(len(x), seed=0, epoch=epoch))
        for own in torch.split(ids, batch):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x[own]), y[own])
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.item())
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            schedule.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()]), losses


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("case", FITTED)
def test_training_is_that_of_the_wanted_batch(found: Found, case: str, world: int) -> None:
    parameters, losses = one_device(CASES[case].get("batch", 10))
    close = 2e-2 if case == "bf16_exchange" else 1e-6
    for rank in found[case, world]:
        assert torch.allclose(torch.tensor(rank["parameters"]), parameters, atol=close)
        assert rank["means"] == pytest.approx(losses, abs=max(close, 1e-5))
        assert rank["steps"] == len(losses)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("case", FITTED)
def test_all_ranks_have_the_same_weights(found: Found, case: str, world: int) -> None:
    first, *others = [rank["parameters"] for rank in found[case, world]]
    assert all(other == first for other in others)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("case", FITTED)
def test_only_the_rank_without_memory_fails(found: Found, case: str, world: int) -> None:
    *others, last = [rank["failures"] for rank in found[case, world]]
    assert bool(last) == (case != "always_fits")
    if case != "all_ranks":
        assert not any(others)


@pytest.mark.parametrize("world", WORLDS[1:])
def test_each_sample_is_seen_once_an_epoch(found: Found, world: int) -> None:
    batches = [rank["seen"][:4] for rank in found["one_rank", world]]
    together = sorted(value for batch in itertools.chain(*batches) for value in batch)
    assert together == pytest.approx(sorted(made()[0][:, 0].tolist()))


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("case", FITTED)
def test_rank_0_prints_the_choice_in_one_line(found: Found, case: str, world: int) -> None:
    first, *others = [rank["printed"].splitlines() for rank in found[case, world]]
    chosen = [line for line in first if "samples per device" in line]
    assert len(chosen) == (2 if case == "without_backward" else 1)
    assert "nfold.Run(accumulate=" in chosen[0]
    if case == "without_backward":
        assert "accumulate=1)" not in chosen[0]
    assert not any(others)
    continued = [line for line in first if "continues with" in line]
    assert len(continued) == len(first) - len(chosen)
    if case == "after_the_choice":
        assert continued


@pytest.mark.parametrize("world", WORLDS)
def test_no_memory_for_one_sample_ends_all_ranks(found: Found, world: int) -> None:
    for rank in found["one_sample", world]:
        assert rank["error"].startswith("OutOfMemory: out of memory with one sample per device")


@pytest.mark.parametrize("world", WORLDS)
def test_a_step_whose_gradients_were_exchanged_is_not_repeated(found: Found, world: int) -> None:
    """On one device it is repeated until the optimizer steps."""
    *others, last = [rank["error"] for rank in found["too_late", world]]
    reason = "after its gradients were complete" if world > 1 else "with one sample per device"
    assert reason in last
    assert all(reason not in other for other in others)
