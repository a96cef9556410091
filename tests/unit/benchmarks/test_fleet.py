"""Arms as they are asked for, and what is told of one that failed."""

from __future__ import annotations

from pathlib import Path

import pytest
from fleet import HERE, KINDS, Spec, Work, told


def test_an_arm_is_written_on_one_line() -> None:
    spec = Spec.parse("nfold:input=resident,precision=bf16")
    assert (spec.name, spec.kind) == ("nfold:input=resident,precision=bf16", "nfold")
    assert spec.fields == (("input", "resident"), ("precision", "bf16"))
    assert Spec.parse("jax").fields == ()


@pytest.mark.parametrize("text", ["", "tensorflow", "nfold:input", "nfold:=1", "careful:a=1,"])
def test_what_is_no_arm_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="careful"):
        Spec.parse(text)


@pytest.mark.parametrize(
    ("arm", "processes", "per_device", "whole"),
    [("careful", 4, 2048, 512), ("dataparallel", 1, 2048, 512), ("jax", 1, 512, 512)],
)
def test_batches_follow_the_devices_that_an_arm_drives(
    arm: str, processes: int, per_device: int, whole: int
) -> None:
    spec = Spec.parse(arm)
    assert spec.processes(4) == processes
    assert Work(workload="cnn10", batch=512, devices=4).batch_of(spec) == per_device
    assert Work(workload="cnn10", batch=512, devices=4, whole=True).batch_of(spec) == whole


def test_every_kind_has_a_script() -> None:
    assert [kind.script for kind in KINDS.values() if not (HERE / kind.script).exists()] == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Traceback:\n  line\nValueError: no\nwarning: late\n", "exit status 1: ValueError: no"),
        ("torch.OutOfMemoryError: 2 GiB\n", "exit status 1: torch.OutOfMemoryError: 2 GiB"),
        ("killed\n\n", "exit status 1: killed"),
        ("", "exit status 1: it printed nothing"),
    ],
)
def test_a_log_tells_why_a_rank_ended(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "log").write_text(text)
    assert told(tmp_path / "log", 1) == said
