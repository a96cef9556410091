"""What is known of an object is not told of another."""

from __future__ import annotations

from nfold.instrument.input.fetch_times import WeakIdentityDict


class Thing:
    """Is there or is not."""


def test_value_belongs_to_its_object() -> None:
    known: WeakIdentityDict[str] = WeakIdentityDict()
    one, other = Thing(), Thing()
    known.put(one, "one")
    assert (known.get(one), known.get(other)) == ("one", None)
    known.put(one, "again")
    assert known.get(one) == "again"


def test_reused_id_has_no_value() -> None:
    """Something else may take the place in memory first: then once more."""
    same = None
    while same is None:
        known: WeakIdentityDict[str] = WeakIdentityDict()
        gone = Thing()
        number = id(gone)
        known.put(gone, "gone")
        del gone
        made = [Thing() for _ in range(1000)]
        same = next((one for one in made if id(one) == number), None)
    assert known.get(same) is None
    known.put(same, "there")
    assert known.get(same) == "there"


def test_unhashable_objects_have_values() -> None:
    known: WeakIdentityDict[str] = WeakIdentityDict()
    samples = [1, 2]
    known.put(samples, "samples")
    assert known.get(samples) == "samples"
    assert known.get([1, 2]) is None
