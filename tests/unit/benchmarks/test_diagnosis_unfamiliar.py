"""Scripts as people of other fields write them, and what is told of them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import unfamiliar


def row(cause: str, whole_ms: float, *, named: bool) -> dict[str, Any]:
    whole = {"value": whole_ms, "low": whole_ms, "high": whole_ms}
    return {"cause": cause, "whole_ms": whole, "named": named, "fix": f"less {cause}"}


FOUND: dict[str, Any] = {
    "budget": [row("link", 2.0, named=True), row("input", 9.0, named=False)],
    "single_device_budget": [row("layout", 5.0, named=True), row("link", 1.0, named=True)],
    "one_device": {"step_ms": {"value": 10.0}},
    "speedup": {"value": 1.5},
    "wrong": ["train.py:7: all get the same"],
}


def test_what_costs_most_of_what_is_named_comes_first() -> None:
    told = unfamiliar.told("train", "cpu:2", FOUND)
    assert told.named == (("layout", 5.0), ("link", 2.0))
    assert told.fix == "less layout"
    assert unfamiliar.table([told])[-1] == (
        "| train | cpu:2 | 10.00 | 1.50 × | layout 5.00 ms, link 2.00 ms | "
        "train.py:7: all get the same; less layout |"
    )


def test_what_was_told_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = unfamiliar.told("train", "2", {**FOUND, "budget": [], "single_device_budget": []})
    file = tmp_path / "told.jsonl"
    file.write_text(json.dumps(dataclasses.asdict(told)) + "\n")
    monkeypatch.setattr("sys.argv", ["unfamiliar.py", "--read", str(file)])
    unfamiliar.main()
    assert unfamiliar.table([told])[-1] in capsys.readouterr().out
    assert "| nothing |" in unfamiliar.table([told])[-1]


@pytest.mark.parametrize("name", unfamiliar.NAMES)
def test_they_know_nothing_of_nfold(name: str) -> None:
    text = (unfamiliar.STRANGERS / f"{name}.py").read_text()
    compile(text, name, "exec")
    assert "nfold" not in text
    assert len(text.splitlines()) <= 300
