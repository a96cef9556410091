"""The plan's ``optimizer_state`` ``sharded``: each parameter is updated on one rank.

The rank that owns a parameter holds its optimizer state, and sends the updated parameter to the
others (stage 1 of S. Rajbhandari and others, ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models, SC 2020). The optimizer stays the script's own object: before its step the
gradients of the other ranks' parameters are hidden, because the optimizers of torch skip a parameter
without a gradient. They are back after the step.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from nfold.core.errors import UsageError
from nfold.instrument.torch_private import foreach_copy

MESSAGE_BYTES = 2**26  # updated parameters of one collective
MESSAGES_IN_FLIGHT = 2


def assign_owners(sizes: Sequence[int], ranks: int, before: Sequence[int] = ()) -> list[int]:
    """Return the rank of each size, so that ranks have about the same sum: largest first.

    ``before`` are the sums that ranks have already.
    """
    loads = list(before) or [0] * ranks
    owners = [0] * len(sizes)
    for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
        owners[place] = loads.index(min(loads))
        loads[owners[place]] += sizes[place]
    return owners


@dataclass(frozen=True)
class Message:
    """Parameters of one type and device that their owner sends together."""

    owner: int
    parameters: list[nn.Parameter]


class ShardedOptimizer:
    """Updates the parameters of an optimizer on the ranks that own them.

    All ranks must step it together, with gradients of the same parameters. The optimizer must
    pass ``require_separate_updates``.
    """

    def __init__(self, optimizer: Optimizer, rank: int, world_size: int) -> None:
        self._optimizer = optimizer
        self._rank, self._world_size = rank, world_size
        self._owners: dict[nn.Parameter, int] = {}
        self._hidden: list[tuple[nn.Parameter, Tensor]] = []
        self._updated: list[nn.Parameter] = []
        self._saving = False
        self._assign()
        self._drop_foreign_state()
        optimizer.register_step_pre_hook(self._hide_gradients)
        optimizer.register_step_post_hook(self._send_updates)
        optimizer.register_state_dict_pre_hook(self._warn_partial)

    def owner(self, parameter: nn.Parameter) -> int:
        return self._owners[parameter]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank's parameters, by their number, and the groups of all."""
        self._saving = True
        try:
            return self._optimizer.state_dict()
        finally:
            self._saving = False

    def load_state_dict(self, whole: dict[str, Any]) -> None:
        """Load this rank's part of a whole state."""
        self._assign()
        numbered = enumerate(self._parameters())
        own = {number for number, p in numbered if self._owners[p] == self._rank}
        state = {number: value for number, value in whole["state"].items() if number in own}
        self._optimizer.load_state_dict({**whole, "state": state})

    def _parameters(self) -> Iterator[nn.Parameter]:
        for group in self._optimizer.param_groups:
            yield from group["params"]

    def _assign(self) -> None:
        """Give parameters without an owner one: those that are trained first, then frozen ones."""
        new = [p for p in self._parameters() if p not in self._owners]
        for trained in (True, False):
            parameters = [p for p in new if p.requires_grad == trained]
            owners = assign_owners([p.nbytes for p in parameters], self._world_size, self._loads())
            self._owners.update(zip(parameters, owners, strict=True))

    def _loads(self) -> list[int]:
        loads = [0] * self._world_size
        for parameter, owner in self._owners.items():
            loads[owner] += parameter.nbytes
        return loads

    def _drop_foreign_state(self) -> None:
        for parameter in self._parameters():
            if self._owners[parameter] != self._rank:
                self._optimizer.state.pop(parameter, None)

    def _warn_partial(self, _optimizer: Optimizer) -> None:
        if not self._saving:
            warnings.warn(
                "optimizer.state_dict() has the state of this rank's parameters only "
                '(optimizer_state "sharded"); next: run.checkpoint(folder), which has all of it',
                stacklevel=4,
            )

    def _hide_gradients(self, _optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if any(value is not None for value in (*args[1:], *kwargs.values())):
            raise UsageError(
                "optimizer.step(closure) computes gradients on one rank only when the optimizer's "
                'state is sharded; next: optimizer.step() after backward(), or optimizer_state="whole"'
            )
        self._assign()
        self._updated = [p for p in self._parameters() if p.grad is not None and p.numel()]
        foreign = [p for p in self._updated if self._owners[p] != self._rank]
        self._hidden = [(p, p.grad) for p in foreign if p.grad is not None]
        for parameter in foreign:
            parameter.grad = None

    @torch.no_grad()
    def _send_updates(self, *_called_with: Any) -> None:
        for parameter, gradient in self._hidden:
            parameter.grad = gradient
        self._hidden = []
        in_flight: deque[tuple[Message, Tensor, Any]] = deque()
        for message in divide_messages(self._updated, self._owners, MESSAGE_BYTES):
            if len(in_flight) == MESSAGES_IN_FLIGHT:
                self._receive(*in_flight.popleft())
            flat = self._pack(message)
            work = dist.broadcast(flat.view(torch.uint8), src=message.owner, async_op=True)
            in_flight.append((message, flat, work))
        while in_flight:
            self._receive(*in_flight.popleft())

    def _pack(self, message: Message) -> Tensor:
        parameters = message.parameters
        if message.owner == self._rank:
            return torch.cat([parameter.detach().flatten() for parameter in parameters])
        return parameters[0].new_empty(sum(parameter.numel() for parameter in parameters))

    def _receive(self, message: Message, flat: Tensor, work: Any) -> None:
        work.wait()
        if message.owner != self._rank:
            parameters: list[Tensor] = [*message.parameters]
            parts = torch.split(flat, [parameter.numel() for parameter in parameters])
            pairs = zip(parameters, parts, strict=True)
            foreach_copy(parameters, [part.view(parameter.shape) for parameter, part in pairs])


def divide_messages(
    parameters: Iterable[nn.Parameter], owners: dict[nn.Parameter, int], limit: int
) -> list[Message]:
    """Return the parameters by owner, type and device, in messages of up to ``limit`` bytes.

    Every message has at least one parameter.
    """
    filled: dict[Any, tuple[Message, int]] = {}
    messages: list[Message] = []
    for parameter in parameters:
        key = owners[parameter], parameter.dtype, parameter.device
        message, size = filled.get(key, (None, limit))
        if message is None or size + parameter.nbytes > limit:
            message, size = Message(owners[parameter], []), 0
            messages.append(message)
        message.parameters.append(parameter)
        filled[key] = message, size + parameter.nbytes
    return sorted(messages, key=lambda message: message.owner)


def require_separate_updates(optimizer: Optimizer) -> None:
    """Raise UsageError if the optimizer may not update each parameter by itself."""
    name = type(optimizer).__name__
    if isinstance(optimizer, LBFGS):
        reason = "LBFGS has one state for all parameters"
    elif not type(optimizer).__module__.startswith("torch.optim."):
        reason = (
            f"{name} is no optimizer of torch.optim: it may compute with all parameters at once"
        )
    else:
        return
    raise UsageError(f'optimizer_state "sharded": {reason}; next: optimizer_state="whole"')
