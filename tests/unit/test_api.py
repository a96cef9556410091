"""Where a script's plan comes from, and what its Run says and writes on one device."""

from __future__ import annotations

import functools
import json
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import nfold
from nfold.api import FOLDER_VARIABLE, PLAN_VARIABLE
from nfold.core.errors import UnknownValue, UsageError
from nfold.core.plan import Plan
from nfold.core.variant import Variant
from nfold.engines.base import Phase
from nfold.launch.handoff import HandoffFolder


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No job, no file of the user's, no GPU."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", FOLDER_VARIABLE, PLAN_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def net() -> nn.Module:
    return nn.Linear(2, 1)


def test_alone_it_is_one_device() -> None:
    run = nfold.Run(device="cpu")
    assert (run.rank, run.world_size, run.is_main, run.device.type) == (0, 1, True, "cpu")
    assert (run.plan.precision, run.plan.step, run.plan.devices) == ("fp32", "eager", 1)


def test_later_sources_of_a_plan_win(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("nfold.toml").write_text('seed = 1\nprecision = "bf16"\naccumulate = 2\ndevice = "cpu"\n')
    assert nfold.Run().plan.seed == 1
    monkeypatch.setenv(PLAN_VARIABLE, json.dumps({"seed": 2, "accumulate": 3}))
    run = nfold.Run(Plan(accumulate=4), layout="channels_last")
    assert (run.plan.seed, run.plan.precision, run.plan.accumulate) == (2, "bf16", 4)
    assert run.plan.layout == "channels_last"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (True, False)),
        ({"precision": "fp32"}, (False, False)),
        ({"precision": "bf16"}, (True, True)),
    ],
)
def test_products_in_fp32_are_as_the_script_sets_them_unless_a_precision_is_asked_for(
    fields: dict[str, Any], expected: tuple[bool, bool]
) -> None:
    cudnn, products = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.allow_tf32, products.allow_tf32
    cudnn.allow_tf32, products.allow_tf32 = True, False
    try:
        nfold.Run(**fields)
        assert (cudnn.allow_tf32, products.allow_tf32) == expected
    finally:
        cudnn.allow_tf32, products.allow_tf32 = before


def test_fields_that_tune_keeps_win_over_those_of_the_script(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in Variant(run_plan=(("precision", "bf16"),)).environment({}).items():
        monkeypatch.setenv(name, value)
    plan = nfold.Run(precision="fp32", layout="channels_last").plan
    assert (plan.precision, plan.layout) == ("bf16", "channels_last")


def test_a_safe_plan_is_a_word_or_a_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    assert nfold.Run("safe", device="cpu").plan.step == "eager"
    monkeypatch.setenv(PLAN_VARIABLE, json.dumps({"safe": True, "seed": 2}))
    assert nfold.Run(device="cpu").plan.seed == 2
    with pytest.raises(UsageError, match=r"plan 'fast': allowed are 'safe' and a nfold\.Plan"):
        nfold.Run("fast", device="cpu")  # type: ignore[arg-type]


def test_a_plan_that_a_script_cannot_follow_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"devices differ.*nfold run --devices"):
        nfold.Run(device="cpu", devices=2)
    with pytest.raises(UsageError, match="fp16 training needs a GPU"):
        nfold.Run(device="cpu", precision="fp16")
    for plan in (Plan(kernels="tuned"), Plan(decode="cpu"), Plan(step="graph")):
        with pytest.raises(UsageError, match=r"kernels|decode|graph"):
            nfold.Run(plan, device="cpu")
    with pytest.raises(UnknownValue, match="'presicion': allowed are precision"):
        nfold.Run(presicion="bf16")
    monkeypatch.setenv(PLAN_VARIABLE, "{")
    with pytest.raises(UsageError, match="NFOLD_PLAN is not JSON"):
        nfold.Run(device="cpu")


def test_what_a_loop_decides_is_refused_but_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("nfold.toml").write_text("batch = 64\nepochs = 3\n")
    nfold.Run(device="cpu")
    with pytest.raises(UsageError, match=r"batch cannot be set.*run\.loader"):
        nfold.Run(device="cpu", batch=64)
    monkeypatch.setenv(PLAN_VARIABLE, json.dumps({"epochs": 2}))
    with pytest.raises(UsageError, match=r"epochs cannot be set.*own loop"):
        nfold.Run(device="cpu")


def test_what_was_not_prepared_is_told_once() -> None:
    run, model = nfold.Run(device="cpu"), net()
    loader = run.loader(torch.ones(4, 2), batch_size=2)
    with pytest.warns(UserWarning, match=r"no model is prepared.*run\.prepare"):
        list(loader)
    run.prepare(model)
    with pytest.warns(UserWarning, match="no optimizer is prepared"):
        list(loader)
    alone = nn.Parameter(torch.ones(1))
    run.prepare(torch.optim.SGD([*model.parameters(), alone], lr=0.1))
    with pytest.warns(UserWarning, match="updates 1 parameters of no prepared model"):
        list(loader)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(loader)


def test_gradients_that_are_not_exchanged_are_told_once() -> None:
    run, model = nfold.Run(device="cpu", accumulate=2), net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.prepare(model, optimizer)
    loader = run.loader(torch.ones(8, 2), batch_size=4)

    def train(*, backward: bool) -> None:
        for x in loader:
            optimizer.zero_grad()
            if backward:
                model(x).mean().backward()
            else:
                found = torch.autograd.grad(model(x).mean(), list(model.parameters()))
                for parameter, gradient in zip(model.parameters(), found, strict=True):
                    parameter.grad = gradient
            optimizer.step()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(backward=True)
    with pytest.warns(UserWarning, match=r"not exchanged.*loss\.backward\(\)") as told:
        train(backward=False)
    assert len(told) == 1


def test_what_cannot_be_prepared_is_named() -> None:
    with pytest.raises(UsageError, match=r"a list cannot be prepared.*run\.loader"):
        nfold.Run(device="cpu").prepare([1])


def test_prepare_returns_what_it_was_given() -> None:
    run, model = nfold.Run(device="cpu"), net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert run.prepare(model) is model
    assert run.prepare(model, optimizer) == (model, optimizer)


def test_captured_on_a_cpu_runs_and_says_where_once() -> None:
    run = nfold.Run(device="cpu", step="captured")
    with pytest.warns(UserWarning, match=r"'captured' needs a GPU: train_step .*test_api\.py:\d+"):

        @run.step
        def train_step(x: int) -> int:
            return 2 * x

    assert train_step(3) == 6


class Doubling:
    def __call__(self, x: int) -> int:
        return 2 * x


@pytest.mark.parametrize(
    ("step", "name"),
    [
        (functools.partial(Doubling.__call__, Doubling()), r"__call__ .*test_api\.py:\d+"),
        (Doubling(), r"Doubling .*test_api\.py:\d+"),
        (functools.partial(math.prod, start=2), r"prod \(built in\)"),
    ],
)
def test_a_step_may_be_anything_that_can_be_called(step: Callable[..., int], name: str) -> None:
    with pytest.warns(UserWarning, match=f"'captured' needs a GPU: {name}"):
        made = nfold.Run(device="cpu", step="captured").step(step)
    assert made is step


def test_a_log_is_a_line_and_a_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    nfold.Run(device="cpu").log(epoch=1, loss=torch.tensor(0.5), note="text")
    assert capsys.readouterr().out == "epoch 1 · loss 0.5 · note text\n"
    record = json.loads((tmp_path / "log.jsonl").read_text())
    assert (record["epoch"], record["loss"], record["step"]) == (1, 0.5, 0)


def test_a_watched_run_beats_its_heart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    run, model = nfold.Run(device="cpu"), net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.prepare(model, optimizer)
    for x in run.loader(torch.ones(6, 2), batch_size=3):
        model(x).sum().backward()
        optimizer.step()
    beat = HandoffFolder(tmp_path).reports.read_heartbeat(0)
    assert beat is not None
    assert (beat.phase, beat.step) == (Phase.STEPPING, 2)


def test_a_checkpoint_of_another_run_is_not_written_over(tmp_path: Path) -> None:
    first = nfold.Run(device="cpu")
    first.prepare(net())
    first.checkpoint(tmp_path / "kept", note=1)
    second = nfold.Run(device="cpu")
    second.prepare(net())
    with pytest.raises(UsageError, match=r"of another run; next: run\.resume"):
        second.checkpoint(tmp_path / "kept")
    assert second.resume(tmp_path / "kept") == {"note": 1}
    second.checkpoint(tmp_path / "kept")


def test_a_checkpoint_of_other_parts_is_refused(tmp_path: Path) -> None:
    first = nfold.Run(device="cpu")
    first.prepare(net())
    first.checkpoint(tmp_path)
    second = nfold.Run(device="cpu")
    with pytest.raises(UsageError, match=r"holds model-0.*after all run\.prepare"):
        second.resume(tmp_path)


def test_sums_and_means_alone_are_the_values() -> None:
    run = nfold.Run(device="cpu")
    assert run.sum(3) == 3
    assert run.sum(torch.tensor([1, 2])).tolist() == [1, 2]
    assert run.mean(2.5, count=4) == 2.5
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run.mean(torch.tensor(2.5, requires_grad=True) * 2) == 5.0
    run._current_share.is_padding = True
    assert run.mean(2.5) == 2.5
    assert math.isnan(run.mean(2.5, count=1))
