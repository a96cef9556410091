"""The allocator's variable in the environment of a rank."""

from __future__ import annotations

import pytest

from nfold.core.variant import Variant


@pytest.mark.parametrize(
    ("before", "name", "value"),
    [
        ({}, "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),
        (
            {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64, expandable_segments:False"},
            "PYTORCH_ALLOC_CONF",
            "max_split_size_mb:64,expandable_segments:True",
        ),
    ],
)
def test_expandable_segments_keep_other_allocator_settings(
    before: dict[str, str], name: str, value: str
) -> None:
    assert Variant().environment(before) == {}
    found = Variant(expandable_segments=True).environment({**before, "HOME": "x"})
    assert found == {name: value}
