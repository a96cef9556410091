"""What is known of an object is not told of another."""

from __future__ import annotations

from nfold.instrument.input.fetch_times import WeakIdentityDict


class Thing:
    """Is there or is not."""


def test_a_value_is_of_the_object_it_was_put_for() -> None:
    known: WeakIdentityDict[str] = WeakIdentityDict()
    one, other = Thing(), Thing()
    known.put(one, "one")
    assert (known.get(one), known.get(other)) == ("one", None)
    known.put(one, "again")
    assert known.get(one) == "again"


def test_what_has_the_number_of_one_that_is_gone_is_another() -> None:
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


def test_what_can_be_neither_hashed_nor_referred_to_is_known_too() -> None:
    known: WeakIdentityDict[str] = WeakIdentityDict()
    samples = [1, 2]
    known.put(samples, "samples")
    assert known.get(samples) == "samples"
    assert known.get([1, 2]) is None
