"""Collectives on tensors of unusual strides."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from nfold.engines.torch.communication.data_parallel import apply_in_place, average_buffers


def _filled(tensor: Tensor) -> None:
    """A collective that takes memory as it lies, from where the tensor begins."""
    tensor.as_strided((tensor.numel(),), (1,)).fill_(7)


@pytest.mark.parametrize(
    ("make", "changed"),
    [
        (lambda base: base, 12),
        (lambda base: base.t(), 12),
        (lambda base: base[:, ::2], 6),
        (lambda base: base[0].expand(5, 4), 4),
        (lambda base: base[1, 2], 1),
        (lambda base: base[:0], 0),
    ],
    ids=["plain", "transposed", "sliced", "expanded", "one", "none"],
)
def test_a_collective_changes_a_tensor_and_no_other_memory(make: object, changed: int) -> None:
    assert callable(make)
    base = torch.zeros(3, 4)
    tensor = make(base)
    apply_in_place(tensor, _filled)
    assert bool((tensor == 7).all())
    assert int((base == 7).sum()) == changed


def test_complex_numbers_travel_as_pairs_of_real_ones() -> None:
    tensor = torch.zeros(2, dtype=torch.complex64)
    apply_in_place(tensor, lambda whole: whole.copy_(torch.ones(2, 2)))
    assert tensor.tolist() == [1 + 1j, 1 + 1j]


def test_buffers_of_any_form_are_averaged(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Module()
    module.register_buffer("sliced", torch.ones(2, 4)[:, ::2])
    module.register_buffer("expanded", torch.ones(2).expand(3, 2))
    module.register_buffer("count", torch.tensor(3))
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor: tensor.mul_(6))
    average_buffers(module, 2)
    found = dict(module.named_buffers())
    assert found["sliced"].tolist() == [[3, 3]] * 2
    assert found["expanded"].tolist() == [[3, 3]] * 3
    assert found["count"].item() == 3
