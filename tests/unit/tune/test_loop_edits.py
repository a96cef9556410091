"""Edits of training loops: gradients exchanged once a step, numbers added up on the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from nfold.core.source_edit import AddUpOnDevice, ExchangeOnce
from nfold.tune.source_patch import make_patch

HEAD = """\
import torch
from torch.nn.parallel import DistributedDataParallel as DDP


def train(loader, optimizer, args):
    model = DDP(torch.nn.Linear(2, 1))
"""
CONDITION = """\
    for index, (x, y) in enumerate(loader):
        loss = model(x).sum()
        loss.backward()
        if (index + 1) % args.steps == 0 or index + 1 == len(loader):
            optimizer.step()
            optimizer.zero_grad()
"""
INNER_LOOP = """\
    batches = iter(loader)
    while True:
        for _ in range(args.steps):
            # the next batch
            model(next(batches)).sum().backward()
        optimizer.step()
"""
TOTAL = """\
    total = 0.0
    for x, y in loader:
        loss = model(x).sum()
        total += {added}  # read
        loss.backward()
        optimizer.step()
    print(total / 7)
"""


def edited(folder: Path, body: str, line: str, kind: type[ExchangeOnce | AddUpOnDevice]) -> str:
    """Return the source after an edit at the line that has a text, or why it is refused."""
    source = HEAD + body
    (folder / "train.py").write_text(source)
    number = next(i for i, text in enumerate(source.splitlines(), 1) if line in text)
    patch = make_patch([kind(location=f"train.py:{number}")], folder)
    if patch.refusals:
        return patch.refusals[0].reason
    (file,) = patch.files
    return file.edited.decode().removeprefix(HEAD)


def test_a_condition_decides_which_backward_exchanges_gradients(tmp_path: Path) -> None:
    gate = (
        "        model.require_backward_grad_sync = "
        "(index + 1) % args.steps == 0 or index + 1 == len(loader)\n"
    )
    first, rest = CONDITION.split("\n", 1)
    assert edited(tmp_path, CONDITION, "optimizer.step()", ExchangeOnce) == f"{first}\n{gate}{rest}"


def test_the_last_batch_of_an_inner_loop_exchanges_gradients(tmp_path: Path) -> None:
    gate = "            model.require_backward_grad_sync = _ == args.steps - 1\n"
    place = "            model(next"
    assert edited(tmp_path, INNER_LOOP, "optimizer.step()", ExchangeOnce) == INNER_LOOP.replace(
        place, gate + place
    )


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (
            "if (index + 1)",
            "index += 1\n        if (index + 1)",
            "uses index, which the loop changes",
        ),
        (
            "loss = model(x)",
            "args.steps = 2; loss = model(x)",
            "uses steps, which the loop changes",
        ),
        ("index + 1 == len(loader)", "ready()", "calls a function"),
        ("model(x)", "args.model(x)", "calls no name of DistributedDataParallel"),
        (
            "if (index + 1) % args.steps == 0 or index + 1 == len(loader)",
            "with args",
            "no condition",
        ),
        ("\n        loss = model(x).sum()", "  # each", ""),
    ],
)
def test_a_step_whose_condition_is_not_known_before_the_batch_is_refused(
    tmp_path: Path, old: str, new: str, reason: str
) -> None:
    assert CONDITION.count(old) == 1
    found = edited(tmp_path, CONDITION.replace(old, new), "optimizer.step()", ExchangeOnce)
    assert reason in found
    assert "require_backward_grad_sync" not in found


@pytest.mark.parametrize(
    ("added", "expected"),
    [
        ("loss.item()", "loss.detach()"),
        ("loss.item() * len(x)", "loss.detach() * len(x)"),
        ("(model(x) == y).sum().item()", "(model(x) == y).sum().detach()"),
    ],
)
def test_a_sum_is_read_after_the_loop(tmp_path: Path, added: str, expected: str) -> None:
    read = '    total = total.item() if hasattr(total, "item") else total\n    print'
    found = edited(tmp_path, TOTAL.format(added=added), "# read", AddUpOnDevice)
    assert found == TOTAL.format(added=expected).replace("    print", read)


@pytest.mark.parametrize("batches", [3, 0])
def test_a_sum_that_is_read_after_the_loop_is_the_same_number(tmp_path: Path, batches: int) -> None:
    body = TOTAL.format(added="(x > 0).sum().item()").replace("total = 0.0", "total = 0")
    source = f"{edited(tmp_path, body, '# read', AddUpOnDevice)}    return total\n"
    names: dict[str, Any] = {}
    exec(f"def train(loader, model, optimizer):\n{source}", names)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters())
    loader = [(torch.ones(4, 2), None)] * batches
    found = names["train"](loader, model, optimizer)
    assert (type(found), found) == (int, 8 * batches)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("loss.item()", "float(loss)", "no one .item()"),
        ("loss.item()", "loss.item() + y.item()", "no one .item()"),
        ("total += loss.item()", "total = loss.item()", "does not add the value to a name"),
        ("total += loss.item()", "args.total += loss.item()", "does not add the value to a name"),
        (
            "        optimizer",
            "        print(total)\n        optimizer",
            "in the loop needs total too",
        ),
        ("    print", "    else:\n        pass\n    print", "an else"),
        ("for x, y in loader:", "if loader:", "it is in no loop"),
    ],
)
def test_a_number_that_the_loop_needs_is_not_deferred(
    tmp_path: Path, old: str, new: str, reason: str
) -> None:
    body = TOTAL.format(added="loss.item()")
    assert body.count(old) == 1
    assert reason in edited(tmp_path, body.replace(old, new), "# read", AddUpOnDevice)
