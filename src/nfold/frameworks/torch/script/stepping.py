"""When a step of a training may end: an optimizer has stepped, or nothing of torch's ever does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from nfold.frameworks.torch.script.late import LateExchange
from nfold.frameworks.torch.script.patches import Patches

SURE = 3
"""Backwards without an optimizer in the process, until nobody waits for one."""


class Backward:
    """In the place of an optimizer, where a script updates by hand what its losses depend on."""

    def __init__(self) -> None:
        self.param_groups: list[dict[str, list[Tensor]]] = []

    def look(self, losses: Tensor | Sequence[Tensor], *, inside: bool) -> None:
        """Before their graph is gone. ``inside`` another one, what a checkpoint cut off is a leaf
        as well.
        """
        losses = (losses,) if isinstance(losses, Tensor) else losses
        found = [leaf for leaf in _leaves(losses) if isinstance(leaf, nn.Parameter) or not inside]
        self.param_groups.append({"params": found})


class Stepping:
    """Tells ``stepped`` of every step, and which optimizer made it.

    ``computing`` is called before every backward. A step that a GradScaler skipped is one too, or
    ranks would part: ``skipped_steps`` counts them.
    In a script that has made no optimizer of torch's, each backward ends a step: what updates the
    parameters after it is timed with the next one. Optimizers that step inside a backward, one for
    each gradient as soon as it is there, are told of when that is over: its graph, and the thread
    that it runs in, are no place to end anything. ``in_backward`` says whether there are any.
    """

    def __init__(
        self,
        late: LateExchange,
        computing: Callable[[], None],
        stepped: Callable[[Any], None],
    ) -> None:
        self._late = late
        self.computing = computing
        self._stepped = stepped
        self.skipped_steps, self.in_backward = 0, False
        self._made = self._made_any = False
        self._depth = self._backwards = 0
        self._by_hand = Backward()
        self._steps_inside = 0
        self._inside_backward: list[Any] = []
        self._hooks: tuple[Any, ...] = ()

    def install(self, patches: Patches) -> None:
        """Put everything in its place."""
        patches.put(Optimizer, "__init__", self._constructing)
        patches.put(torch.autograd, "backward", self._backward)
        patches.put(GradScaler, "step", self._scaling)
        before = register_optimizer_step_pre_hook(lambda *_: self._begin())
        self._hooks = (before, register_optimizer_step_post_hook(lambda one, *_: self._end(one)))

    def remove(self) -> None:
        """What ``patches`` do not undo."""
        for hook in self._hooks:
            hook.remove()

    def _begin(self) -> None:
        self._steps_inside += 1

    def _end(self, optimizer: Any) -> None:
        """A step inside another's is a part of it: one that shards its state steps its own part."""
        self._steps_inside = max(0, self._steps_inside - 1)
        if self._steps_inside:
            return
        if self._depth:
            self.in_backward = True
            self._inside_backward.append(optimizer)
        else:
            self._step(optimizer)

    def _step(self, optimizer: Any) -> None:
        self._made = True
        self._stepped(optimizer)

    def _scaling(self, usual: Any) -> Any:
        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            self._made = False
            self._late.scaled(optimizer)
            returned = usual(scaler, optimizer, *args, **kwargs)
            if not self._made:
                self.skipped_steps += 1
                self._step(optimizer)
            return returned

        return step

    def _constructing(self, usual: Any) -> Any:
        def construct(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            self._made_any = True
            usual(optimizer, *args, **kwargs)

        return construct

    def _backward(self, usual: Any) -> Any:
        """The outermost one is a step: reentrant checkpoints make others inside it."""

        def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            self.computing()
            top = not self._depth
            outermost = top and not self._made_any
            self._backwards += outermost
            if self._backwards == SURE and not self._made_any:
                self._by_hand.look(tensors, inside=not outermost)
            if top:
                self._inside_backward.clear()
            self._depth += 1
            try:
                usual(tensors, *args, **kwargs)
            finally:
                self._depth -= 1
            if outermost and self._backwards >= SURE:
                self._late.exchange(self._by_hand)
                self._step(self._by_hand)
            for optimizer in tuple(self._inside_backward) if top else ():
                self._step(optimizer)

        return backward


def _leaves(losses: Sequence[Tensor]) -> Iterator[Tensor]:
    """What gets a gradient, in an order that is every rank's."""
    todo: list[Any] = [loss.grad_fn for loss in losses]
    met: set[Any] = set()
    while todo:
        node = todo.pop()
        if node is None or node in met:
            continue
        met.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        todo += [following for following, _ in node.next_functions]
