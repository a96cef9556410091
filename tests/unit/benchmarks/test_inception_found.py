"""Which of Inception's arms run side by side and where, and what their rates say."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from fleet import Place
from inception import ASKED, SPECS, Question, phases, places, spec_of
from inception_found import best_of, binding, ratios, table

from nfold.core.input_rates import ImageRate

RATES = {
    ("cpu", 1): [2000.0, 2000.0, 2000.0],
    ("augment", 1): [4000.0, 4100.0, 4000.0],
    ("decode", 1): [3000.0, 3000.0, 3000.0],
    ("model", 1): [4200.0, 4200.0, 4200.0],
    ("careful", 4): [5200.0, 5200.0, 5200.0],
    ("augment", 4): [15600.0, 15600.0, 15600.0],
}


def steady(value: float) -> ImageRate:
    return ImageRate(value=value, low=value, high=value)


def test_phases_fill_the_devices_and_best_waits_for_what_it_is_of() -> None:
    asked = [Question.parse(text) for text in ASKED.split()]
    found = [" ".join(map(str, phase)) for phase in phases(asked, 4)]
    assert found == [
        "cpu@1 augment@1 decode@1 cache@1",
        "replayed@1 model@1 best@2",
        "best@4",
        "careful@4",
        "cpu@4",
        "careful@1",
    ]
    alone = [" ".join(map(str, phase)) for phase in phases(asked, 1)]
    assert alone == [text for text in ASKED.split() if text.endswith("@1")]
    few = [Question.parse("augment@1"), Question.parse("best@2")]
    assert [len(phase) for phase in phases(few, 4)] == [1, 1]


@pytest.mark.parametrize("text", ["cpu", "gpu@1", "cpu@0", "cpu@x", "@1"])
def test_a_question_names_its_arm_and_devices(text: str) -> None:
    with pytest.raises(ValueError, match=r"ARM@DEVICES; arms are cpu, "):
        Question.parse(text)


def test_arms_side_by_side_share_neither_cores_nor_devices() -> None:
    phase = [Question("cpu", 1), Question("augment", 2)]
    assert places(phase, 3, list(range(12)), True) == [
        Place(cores=frozenset({0, 1, 2}), gpus=(0,)),
        Place(cores=frozenset(range(3, 9)), gpus=(1, 2)),
    ]
    assert places(phase, 3, list(range(12)), False)[1].gpus == ()


def test_gpus_are_of_those_that_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(cores=frozenset({0}), gpus=(1, 2))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert place.environment() == {"CUDA_VISIBLE_DEVICES": "5,6"}
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert place.environment() == {"CUDA_VISIBLE_DEVICES": "1,2"}


@pytest.mark.parametrize("name", SPECS)
def test_every_arm_is_one_that_the_fleet_knows(name: str) -> None:
    given = SimpleNamespace(device="cuda", step="compiled+captured")
    spec = spec_of(Question(name, 1), given)  # type: ignore[arg-type]
    assert dict(spec.fields).get("precision") == (None if name == "careful" else "bf16")


def test_ratios_are_of_the_fastest_placement() -> None:
    assert best_of(RATES) == "augment"
    assert best_of({}) == "augment"
    assert best_of({("decode", 1): [2.0], ("cache", 1): [3.0], ("cache", 2): [1.0]}) == "cache"
    said = ratios(RATES)
    assert [line.split(":")[0] for line in said] == [
        "augment / cpu on 1",
        "augment / careful on 4",
        "efficiency of augment on 4",
    ]
    assert said[0].startswith("augment / cpu on 1: 2.000 (2.000–2.050)")
    assert said[2].startswith("efficiency of augment on 4: 0.975 (0.951–0.975)")


def test_the_table_has_seconds_of_a_batch() -> None:
    assert table({("cpu", 2): [1024.0]}, 256).splitlines()[1].split() == [
        "cpu", "2", "1,024", "512", "0.500",
    ]  # fmt: skip


def test_what_binds_is_the_lowest_of_what_was_measured_alone() -> None:
    said = binding(RATES, steady(450.0), steady(135.0), steady(3100.0), cores=15).splitlines()
    assert said[0].startswith("a core decodes 450 images/s")
    assert "nvJPEG on one GPU decodes 3,100" in said[1]
    cpu, augment, decode = said[2:]
    assert "0.99 of 15 cores that decode and distort: bound by it" in cpu
    assert "0.95 of the model alone: bound by it" in augment
    assert "0.97 of nvJPEG: bound by it" in decode
    slow = binding({("cpu", 1): [900.0]}, steady(450.0), steady(135.0), None, cores=15)
    assert "below every limit, the lowest is" in slow
