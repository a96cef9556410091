"""A rank's own part of a collective, without the others: values of the right form, nobody waits."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

from torch import Tensor


def _keep_tensor(*_args: Any) -> None:
    """The tensor stays as it is."""


def _all_gather(outputs: list[Tensor], tensor: Tensor, *_args: Any) -> None:
    for output in outputs:
        output.copy_(tensor)


def _fill_tensor(output: Tensor, tensor: Tensor, *_args: Any) -> None:
    """Into one tensor of all ranks' parts, or out of one: over and over, or the first part."""
    own, size = tensor.reshape(-1), output.numel()
    times = -(-size // max(1, len(own)))
    output.copy_((own if times == 1 else own.repeat(times))[:size].view_as(output))


def _copy_first(output: Tensor, inputs: list[Tensor], *_args: Any) -> None:
    output.copy_(inputs[0])


def _all_to_all(outputs: list[Tensor], inputs: list[Tensor], *_args: Any) -> None:
    for output, own in zip(outputs, inputs, strict=False):
        _fill_tensor(output, own)


def _gather(tensor: Tensor, gather_list: list[Tensor] | None = None, *_args: Any) -> None:
    _all_gather(gather_list or [], tensor)


def _scatter(tensor: Tensor, scatter_list: list[Tensor] | None = None, *_args: Any) -> None:
    if scatter_list:
        tensor.copy_(scatter_list[0])


def _all_gather_object(outputs: list[Any], value: Any, *_args: Any) -> None:
    outputs[:] = [value] * len(outputs)


def _gather_object(value: Any, outputs: list[Any] | None = None, *_args: Any) -> None:
    if outputs:
        _all_gather_object(outputs, value)


WITHOUT_OUTPUT = ("all_reduce", "broadcast", "reduce", "barrier", "monitored_barrier")
LOCAL_COLLECTIVES: dict[str, Callable[..., None]] = dict(
    chain(
        ((name, _keep_tensor) for name in WITHOUT_OUTPUT),
        (
            ("all_gather", _all_gather),
            ("all_gather_into_tensor", _fill_tensor),
            ("all_gather_single", _fill_tensor),
            ("reduce_scatter_tensor", _fill_tensor),
            ("reduce_scatter_single", _fill_tensor),
            ("all_to_all_single", _fill_tensor),
            ("reduce_scatter", _copy_first),
            ("all_to_all", _all_to_all),
            ("gather", _gather),
            ("scatter", _scatter),
            ("all_gather_object", _all_gather_object),
            ("gather_object", _gather_object),
        ),
    )
)
"""By the name of the collective; arguments in the order of ``torch.distributed``.

PyTorch 2.13 renamed ``all_gather_into_tensor`` and ``reduce_scatter_tensor`` to
``all_gather_single`` and ``reduce_scatter_single``. It keeps the old names, which call the new
ones; older versions have only the old names.
"""
