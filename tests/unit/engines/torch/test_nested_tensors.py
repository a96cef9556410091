"""Nested values are flattened to tensors and rebuilt."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from integration.scripts.user_models import AttributeDict, ModelOutput
from nfold.engines.torch.nested_tensors import flatten_tensors, map_tensors


class Pair(NamedTuple):
    first: object
    second: object


ONE, TWO = torch.tensor(1), torch.tensor(2)
VALUES = [
    ONE,
    (ONE, "text", TWO),
    [ONE, {"a": TWO, "b": [3, None]}],
    Pair(ONE, {"x": (TWO,)}),
    {},
    OrderedDict(a=ONE, b=OrderedDict(c=TWO)),
    UserDict(a=ONE, b=[TWO, None]),
    ModelOutput(loss=ONE, logits=TWO),
    UserDict(a=[TWO], b="text"),
    7,
]


@pytest.mark.parametrize("value", VALUES, ids=str)
def test_a_value_is_put_together_with_other_tensors(value: object) -> None:
    tensors, form = flatten_tensors(value)
    changed = form.fill(iter([tensor + 10 for tensor in tensors]))
    assert repr(changed) == repr(map_tensors(value, lambda tensor: tensor + 10))
    assert type(changed) is type(value)


def test_forms_are_equal_where_only_tensors_differ() -> None:
    assert _form([ONE, 3]) == _form([TWO, 3])
    assert hash(_form([ONE, 3])) == hash(_form([TWO, 3]))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([ONE, 3], [ONE, 4]),
        ([ONE, 1], [ONE, True]),
        ([ONE], (ONE,)),
        ({"a": ONE}, {"b": ONE}),
        ([ONE, object()], [ONE, object()]),
        ([ONE, None], [ONE, ONE]),
        (OrderedDict(a=ONE), {"a": ONE}),
        ({"a": ONE}, UserDict(a=ONE)),
        (pack_sequence([torch.zeros(2)]), pack_sequence([torch.zeros(2)])),
    ],
)
def test_forms_differ_where_anything_else_does(one: object, other: object) -> None:
    assert _form(one) != _form(other)


def test_objects_are_compared_by_identity() -> None:
    held = {1, 2}
    assert _form([held]) == _form([held])
    assert _form([held]) != _form([{1, 2}])


def _form(value: object) -> object:
    tensors, form = flatten_tensors(value)
    assert all(isinstance(tensor, Tensor) for tensor in tensors)
    return form


def test_packed_sequences_keep_their_sizes_on_the_host() -> None:
    packed = pack_sequence([torch.zeros(2), torch.zeros(3)], enforce_sorted=False)
    there: Any = map_tensors([packed], lambda tensor: tensor.to("meta"))[0]
    assert type(there) is PackedSequence
    moved = [there.data, there.sorted_indices, there.unsorted_indices]
    assert [tensor is not None and tensor.device.type for tensor in moved] == ["meta"] * 3
    assert there.batch_sizes.tolist() == [2, 2, 1]


@pytest.mark.parametrize("kind", [dict, OrderedDict, UserDict])
def test_a_dictionary_of_any_kind_stays_one_with_its_tensors_changed(kind: Any) -> None:
    given = kind(a=[ONE], b="text")
    changed = map_tensors(given, lambda tensor: tensor + 10)
    assert type(changed) is kind
    assert dict(changed) == {"a": [ONE + 10], "b": "text"}
    assert given["a"] == [ONE]


@pytest.mark.parametrize("kind", [ModelOutput, AttributeDict])
def test_attributes_of_a_dictionary_are_its_changed_items(kind: Any) -> None:
    given = kind(loss=ONE, states=(ONE, TWO), cache=None)
    tensors, form = flatten_tensors(given)
    for changed in (
        map_tensors(given, lambda tensor: tensor + 10),
        form.fill(iter([tensor + 10 for tensor in tensors])),
    ):
        assert type(changed) is kind
        assert changed["loss"] == ONE + 10
        assert all(getattr(changed, name) is item for name, item in changed.items())
    assert given.loss is given["loss"] is ONE


@pytest.mark.parametrize("value", VALUES, ids=str)
def test_a_value_whose_tensors_stay_is_returned_itself(value: object) -> None:
    assert map_tensors(value, lambda tensor: tensor) is value
    assert map_tensors((value, [ONE]), lambda x: TWO if x is ONE else x)[1] == [TWO]


def test_objects_of_other_classes_are_passed_unchanged() -> None:
    class Cache:
        def __init__(self) -> None:
            self.keys = [ONE]

        def __iter__(self) -> Any:
            return iter(self.keys)

    cache = Cache()
    assert map_tensors([cache], lambda tensor: tensor + 10)[0] is cache
    assert cache.keys == [ONE]
