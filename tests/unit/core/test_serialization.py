"""Plain values: every kind of field there and back, and nothing half understood."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from nfold.core.serialization import deserialize, serialize


@dataclass(frozen=True)
class Inner:
    count: int
    ratio: float | None = None


@dataclass(frozen=True)
class Outer:
    name: str
    flag: bool = False
    kind: Literal["a", "b"] = "a"
    inner: Inner | None = None
    row: tuple[Inner, ...] = ()
    pair: tuple[int, str] = (0, "")
    pairs: tuple[tuple[int, float], ...] = ()
    table: dict[str, str] = field(default_factory=dict)
    anything: Any = None


FULL = Outer(
    name="x",
    flag=True,
    kind="b",
    inner=Inner(1, 0.5),
    row=(Inner(2), Inner(3, 4.0)),
    pair=(5, "y"),
    pairs=((6, 7.0), (8, 9.5)),
    table={"k": "v"},
    anything=[1, {"a": None}],
)


@pytest.mark.parametrize("value", [FULL, Outer(name="")])
def test_there_and_back_through_json(value: Outer) -> None:
    assert deserialize(Outer, json.loads(json.dumps(serialize(value)))) == value


def test_serialized_values_are_json() -> None:
    plain = serialize(FULL)
    assert plain["row"] == [{"count": 2, "ratio": None}, {"count": 3, "ratio": 4.0}]
    assert plain["pairs"] == [[6, 7.0], [8, 9.5]]
    assert serialize({1: (2, 3)}) == {"1": [2, 3]}


def test_a_class_is_not_an_instance() -> None:
    assert serialize(Outer) is Outer


def test_a_whole_number_will_do_for_a_float_and_becomes_one() -> None:
    read = deserialize(Inner, {"count": 1, "ratio": 2})
    assert read == Inner(1, 2.0)
    assert type(read.ratio) is float


@pytest.mark.parametrize(
    ("entry", "value", "message"),
    [
        ("name", 5, r"Outer.name: 5 is not of type str"),
        ("name", None, r"Outer.name: None is not of type str"),
        ("flag", 1, r"Outer.flag: 1 is not of type bool"),
        ("kind", "c", r"Outer.kind: 'c' is not one of a, b"),
        ("inner", {"count": True}, r"Outer.inner.count: True is not of type int"),
        ("inner", {"count": "1"}, r"Outer.inner.count: '1' is not of type int"),
        ("inner", {"count": 1.0}, r"Outer.inner.count: 1.0 is not of type int"),
        ("inner", {"count": 1, "ratio": True}, r"Outer.inner.ratio: True is not of type float"),
        ("inner", {"count": 1, "ratio": "x"}, r"Outer.inner.ratio: 'x' is not of type float"),
        ("inner", {"count": 1, "new": 2}, r"Outer.inner: unknown entries \['new'\]"),
        ("inner", {}, r"Outer.inner: .*count"),
        ("inner", [], r"Outer.inner: \[\] is not of type dict"),
        ("row", {"count": 1}, r"Outer.row: .* is not of type list"),
        ("row", [{"count": 1}, 2], r"Outer.row\[1\]: 2 is not of type dict"),
        ("pair", [1], r"Outer.pair: 1 entries instead of 2"),
        ("pair", [1, 2], r"Outer.pair\[1\]: 2 is not of type str"),
        ("table", {"k": 1}, r"Outer.table.k: 1 is not of type str"),
    ],
)
def test_a_wrong_entry_is_named(entry: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        deserialize(Outer, {**serialize(FULL), entry: value})


def test_an_unknown_entry_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown entries \['extra'\]; known are .*'name'"):
        deserialize(Outer, {**serialize(FULL), "extra": 1})


def test_a_missing_entry_takes_its_default_or_is_named() -> None:
    assert deserialize(Outer, {"name": "x"}) == Outer(name="x")
    with pytest.raises(ValueError, match="name"):
        deserialize(Outer, {})
