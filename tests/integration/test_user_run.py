"""nfold.Run on 1, 2 and 3 CPU devices against the same training in plain PyTorch."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from integration.scripts.own_model import EPOCHS, Net, made
from launched import RunsByWorld, launch
from nfold.engines.sampling import epoch_order

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

SCRIPT = Path(__file__).parent / "scripts" / "own_model.py"
STILL_BUSY = SCRIPT.with_name("still_busy.py")
ONE_DEVICE = pytest.mark.slow("nfold.Run on 1 device", parts=6)
THREE_DEVICES = pytest.mark.slow("nfold.Run on 3 devices", parts=6)
WORLDS = (pytest.param(1, marks=ONE_DEVICE), 2, pytest.param(3, marks=THREE_DEVICES))
RESIDENT_BYTES = 1480
"""Free for the data of 1184 bytes: of a host, enough for one copy, and for two ranks' shards."""
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "dataset": {"data": "dataset"},
    "dataloader": {"data": "dataloader"},
    "generator": {"data": "generator", "shuffle": False},
    "clip": {"clip": 0.05},
    "accumulate": {"plan": {"accumulate": 2}},
    "accumulate_beyond_batch": {"plan": {"accumulate": 4}, "clip": 0.05},
    "second_backward": {"second_backward": True},
    "aside": {"aside_on_rank_0": True},
    "different_weights": {"different_weights": True},
    "bf16_exchange": {"plan": {"exchange": "bf16"}},
    "captured": {"plan": {"step": "captured"}, "run_step": True, "epochs": 6},
    "captured_in_parts": {
        "plan": {"step": "captured", "accumulate": 2},
        "run_step": True,
        "epochs": 6,
        "clip": 0.05,
    },
    "captured_reading": {
        "plan": {"step": "captured"},
        "run_step": True,
        "reads": True,
        "epochs": 6,
    },
    "batch_norm": {"norm": True, "plan": {"batch_norm": "synchronised"}},
    "own_batch_norm": {"norm": True},
    "one_left": {"batch": 12},
    "resident": {"plan": {"input": "resident"}, "batch": 12, "free_bytes": RESIDENT_BYTES},
    "resident_in_parts": {
        "plan": {"input": "resident", "accumulate": 4},
        "free_bytes": RESIDENT_BYTES,
    },
    "evaluation_summed": {"evaluate": "run.sum"},
    "evaluation_all_reduced": {"evaluate": "all_reduce"},
    "evaluation_not_summed": {"evaluate": "none", "folder": "evaluated", "epochs": 4},
    "stopped": {"folder": "checkpoints", "checkpoint": 3, "stop": True},
    "resumed": {"folder": "checkpoints", "checkpoint": 3},
}


Found = dict[tuple[str, int], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What every rank of every case ended with, by (case, world)."""

    def run(world: int) -> Found:
        folder = tmp_path_factory.mktemp(f"world-{world}")
        (folder / "cases.json").write_text(json.dumps(CASES))
        launch(SCRIPT, world, str(folder / "cases.json"), str(folder))
        results: Found = {}
        for case in CASES:
            files = [folder / f"{case}-{rank}.json" for rank in range(world)]
            results[case, world] = [
                {
                    **json.loads(f.read_text()),
                    "warnings": json.loads(f.with_suffix(".warnings").read_text()),
                }
                for f in files
                if f.exists()
            ]
        return results

    return RunsByWorld(run)


def reference(**fields: Any) -> Tensor:
    """The parameters after the script's training without nfold, on one device."""
    return one_device(**fields)[0]


def one_device(
    *,
    batch: int = 10,
    shuffle: bool = True,
    clip: float | None = None,
    second: bool = False,
    norm: bool = False,
    epochs: int = EPOCHS,
) -> tuple[Tensor, list[float]]:
    """The same with the loss of every step."""
    losses: list[float] = []
    torch.manual_seed(3)
    model = Net(norm=norm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    x, y = made()
    for epoch in range(epochs):
        ids = torch.from_numpy(epoch_order(len(x), seed=0, epoch=epoch, shuffle=shuffle))
        for own in torch.split(ids, batch):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x[own]), y[own])
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.item())
            if second:
                (0.1 * model(x[own]).square().mean()).backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            schedule.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()]), losses


REFERENCES: dict[str, dict[str, Any]] = {
    "plain": {},
    "dataset": {},
    "dataloader": {},
    "generator": {"shuffle": False},
    "clip": {"clip": 0.05},
    "accumulate": {},
    "accumulate_beyond_batch": {"clip": 0.05},
    "second_backward": {"second": True},
    "captured": {"epochs": 6},
    "captured_in_parts": {"clip": 0.05, "epochs": 6},
    "captured_reading": {"epochs": 6},
    "batch_norm": {"norm": True},
    "one_left": {"batch": 12},
    "resident": {"batch": 12},
    "resident_in_parts": {},
    "resumed": {},
}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("case", REFERENCES)
def test_weights_end_as_without_nfold_on_one_device(found: Found, case: str, world: int) -> None:
    expected = reference(**REFERENCES[case])
    for rank in found[case, world]:
        assert torch.allclose(torch.tensor(rank["parameters"]), expected, atol=1e-6)
        assert rank["steps"] == 4 * CASES[case].get("epochs", EPOCHS)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("case", [case for case in CASES if case != "stopped"])
def test_every_rank_ends_with_the_same_weights(found: Found, case: str, world: int) -> None:
    first, *others = [rank["parameters"] for rank in found[case, world]]
    assert all(other == first for other in others)


@pytest.mark.parametrize("world", WORLDS[1:])
def test_each_sample_is_seen_once_an_epoch(found: Found, world: int) -> None:
    x, _ = made()
    batches = [rank["seen"][:4] for rank in found["plain", world]]
    together = sorted(value for batch in itertools.chain(*batches) for value in batch)
    assert together == pytest.approx(sorted(x[:, 0].tolist()))


@pytest.mark.parametrize("world", WORLDS)
def test_an_evaluation_counts_every_sample_once(found: Found, world: int) -> None:
    ranks = found["plain", world]
    assert {rank["count"] for rank in ranks} == {37}
    assert sum(rank["own_count"] for rank in ranks) == 37
    assert len({rank["right"] for rank in ranks}) == 1


@ONE_DEVICE
@pytest.mark.parametrize("world", WORLDS[1:])
def test_an_evaluation_is_right_as_often_as_on_one_device(found: Found, world: int) -> None:
    assert found["plain", world][0]["right"] == found["plain", 1][0]["right"]


@pytest.mark.parametrize("world", WORLDS)
def test_rank_0_warns_once_about_an_evaluation_that_was_not_summed(
    found: Found, world: int
) -> None:
    def count(case: str) -> list[int]:
        return [sum("run.sum" in text for text in rank["warnings"]) for rank in found[case, world]]

    assert count("evaluation_summed") == count("evaluation_all_reduced") == [0] * world
    assert count("evaluation_not_summed") == [int(world > 1)] + [0] * (world - 1)


@THREE_DEVICES
def test_means_are_weighted(found: Found) -> None:
    assert [rank["mean"] for rank in found["plain", 3]] == [pytest.approx(5 / 3)] * 3


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("case", ["one_left", "resident"])
def test_a_mean_is_that_of_the_batch_where_ranks_have_no_sample(
    found: Found, case: str, world: int
) -> None:
    """The last batch of 37 samples in batches of 12 is one sample."""
    _, losses = one_device(batch=12)
    for rank in found[case, world]:
        assert rank["means"] == pytest.approx(losses, abs=1e-5)


@pytest.mark.parametrize("world", WORLDS)
def test_resident_data_give_the_samples_of_a_loader(found: Found, world: int) -> None:
    """Whole on one device, in shards of a half or a third each on several."""
    for own, other in zip(found["resident", world], found["one_left", world], strict=True):
        assert own["seen"] == other["seen"]


@pytest.mark.parametrize("world", WORLDS)
def test_a_parameter_that_no_rank_used_keeps_no_gradient(found: Found, world: int) -> None:
    assert not any(rank["aside_has_gradient"] for rank in found["plain", world])


@pytest.mark.parametrize("world", WORLDS[1:])
def test_a_parameter_that_one_rank_used_has_a_gradient_on_all(found: Found, world: int) -> None:
    assert all(rank["aside_has_gradient"] for rank in found["aside", world])


@pytest.mark.parametrize("world", WORLDS[1:])
def test_a_parameter_that_some_ranks_use_gets_only_their_gradient(found: Found, world: int) -> None:
    expected = reference_aside(world)
    for rank in found["aside", world]:
        assert torch.allclose(torch.tensor(rank["parameters"]), expected, atol=1e-6)


def reference_aside(world: int) -> Tensor:
    """Two epochs on one device in which the samples of rank 0's slices go through ``aside``."""
    torch.manual_seed(3)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    x, y = made()
    for epoch in range(2):
        ids = torch.from_numpy(epoch_order(len(x), seed=0, epoch=epoch))
        for batch in torch.split(ids, 10):
            optimizer.zero_grad()
            first = len(batch) // world
            own, others = batch[:first], batch[first:]
            logits = torch.cat([model(x[own], aside=True), model(x[others])])
            nn.functional.cross_entropy(logits, y[batch]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("world", WORLDS[1:])
def test_a_device_s_own_batch_norm_is_another_training(found: Found, world: int) -> None:
    """So that the weights of ``batch_norm`` agree for a fields."""
    parameters = torch.tensor(found["own_batch_norm", world][0]["parameters"])
    assert not torch.allclose(parameters, reference(norm=True), atol=1e-3)


@ONE_DEVICE
@pytest.mark.parametrize("world", WORLDS[1:])
def test_running_statistics_are_those_of_one_device(found: Found, world: int) -> None:
    expected = found["batch_norm", 1][0]["running"]
    for rank in found["batch_norm", world]:
        for own, one_device in zip(rank["running"], expected, strict=True):
            assert own == pytest.approx(one_device, abs=1e-6)


def test_a_compressed_exchange_is_close_and_is_used(found: Found) -> None:
    expected = reference()
    for rank in found["bf16_exchange", 2]:
        parameters = torch.tensor(rank["parameters"])
        assert torch.allclose(parameters, expected, atol=2e-2)
        assert not torch.allclose(parameters, expected, atol=1e-6)


@pytest.mark.parametrize("world", WORLDS)
def test_a_resumed_run_has_its_own_values_back(found: Found, world: int) -> None:
    assert {json.dumps(r["resumed"]) for r in found["resumed", world]} == {'{"note": "half way"}'}
    assert not found["stopped", world]


def test_the_model_stays_the_users_own(found: Found) -> None:
    rank = found["plain", 2][0]
    assert rank["model_class"] == "Net"
    assert rank["keys"][0] == "first.weight"


def test_a_script_may_end_while_a_thread_of_gloo_runs_python() -> None:
    launch(STILL_BUSY, 2)
