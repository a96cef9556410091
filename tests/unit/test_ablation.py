"""Ablations: none is defined yet, and none is read by mistake."""

from __future__ import annotations

import pytest

from nfold.ablation import Ablation


def test_the_empty_one_there_and_back() -> None:
    assert Ablation().to_dict() == {}
    assert Ablation.from_dict({}) == Ablation()


def test_one_of_a_newer_nfold_is_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown ablation entries \['input'\]"):
        Ablation.from_dict({"input": "replayed"})
