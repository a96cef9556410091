"""Python's garbage collector in a script whose objects are frozen."""

from __future__ import annotations

import gc

import pytest

from instrumented import instrumented, script_task, usual
from nfold.core.errors import Unsupported
from nfold.core.script_profile import ScriptProfile, SourceLocation
from nfold.core.source_edit import AddStatement
from nfold.core.variant import Variant
from nfold.interventions.execution.garbage_collection_frozen import FULL_COLLECTION_INTERVAL

ON = Variant(garbage_collection_frozen=True)


@pytest.mark.parametrize("variant", [Variant(), ON])
def test_objects_are_frozen_until_the_script_ends(variant: Variant) -> None:
    before, frozen_before = gc.get_threshold(), gc.get_freeze_count()
    states: list[tuple[int, bool]] = []

    def training() -> None:
        usual(
            epochs=3,
            after_epoch=lambda: states.append(
                (gc.get_threshold()[2], gc.get_freeze_count() > frozen_before)
            ),
        )

    instrumented(training, script_task(variant))
    expected = (FULL_COLLECTION_INTERVAL, True) if variant else (before[2], False)
    assert states
    assert set(states) == {expected}
    assert (gc.get_threshold(), gc.get_freeze_count()) == (before, frozen_before)


def test_a_script_that_disables_the_collector_is_refused() -> None:
    gc.disable()
    try:
        with pytest.raises(Unsupported, match="disables garbage collection"):
            instrumented(usual, script_task(ON))
    finally:
        gc.enable()


def test_the_edits_are_statements_that_freeze() -> None:
    place = SourceLocation(line="train.py:9")
    profile = ScriptProfile(source_locations={"optimizer": (place,)})
    edits = Variant.garbage_collection_frozen.source_edits(True, profile) or ()
    statements = [each for each in edits if isinstance(each, AddStatement)]
    assert {(each.location, each.place) for each in statements} == {("train.py:9", "before")}
    before = gc.get_threshold()
    try:
        for each in statements:
            exec("\n".join([*each.imports, each.statement]), {})
        assert gc.get_threshold() == (*before[:2], FULL_COLLECTION_INTERVAL)
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)
    assert Variant.garbage_collection_frozen.source_edits(True, ScriptProfile()) is None
