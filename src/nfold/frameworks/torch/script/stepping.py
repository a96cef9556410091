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

from nfold.frameworks.torch.script.late import PostBackwardAllReduce
from nfold.frameworks.torch.script.patches import Patches

BACKWARDS_WITHOUT_OPTIMIZER = 3
"""Backwards without an optimizer in the process, until nobody waits for one."""


class Backward:
    """In the place of an optimizer, where a script updates by hand what its losses depend on."""

    def __init__(self) -> None:
        self.param_groups: list[dict[str, list[Tensor]]] = []

    def find_parameters(self, losses: Tensor | Sequence[Tensor], *, nested: bool) -> None:
        """Before their graph is gone. ``inside`` another one, what a checkpoint cut off is a leaf
        as well.
        """
        losses = (losses,) if isinstance(losses, Tensor) else losses
        found = [
            leaf for leaf in _graph_leaves(losses) if isinstance(leaf, nn.Parameter) or not nested
        ]
        self.param_groups.append({"params": found})


class OptimizerStepHooks:
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
        post_backward: PostBackwardAllReduce,
        on_compute: Callable[[], None],
        on_step: Callable[[Any], None],
    ) -> None:
        self._post_backward = post_backward
        self.on_compute = on_compute
        self._on_step = on_step
        self.skipped_steps, self.steps_in_backward = 0, False
        self._scaler_stepped = self._has_optimizer = False
        self._depth = self._backwards = 0
        self._backward_steps = Backward()
        self._step_depth = 0
        self._stepped_in_backward: list[Any] = []
        self._hooks: tuple[Any, ...] = ()

    def install(self, patches: Patches) -> None:
        """Put everything in its place."""
        patches.put(Optimizer, "__init__", self._wrap_optimizer_init)
        patches.put(torch.autograd, "backward", self._wrap_backward)
        patches.put(GradScaler, "step", self._wrap_scaler_step)
        before = register_optimizer_step_pre_hook(lambda *_: self._before_step())
        self._hooks = (
            before,
            register_optimizer_step_post_hook(lambda one, *_: self._after_step(one)),
        )

    def uninstall(self) -> None:
        """What ``patches`` do not undo."""
        for hook in self._hooks:
            hook.remove()

    def _before_step(self) -> None:
        self._step_depth += 1

    def _after_step(self, optimizer: Any) -> None:
        """A step inside another's is a part of it: one that shards its state steps its own part."""
        self._step_depth = max(0, self._step_depth - 1)
        if self._step_depth:
            return
        if self._depth:
            self.steps_in_backward = True
            self._stepped_in_backward.append(optimizer)
        else:
            self._report_step(optimizer)

    def _report_step(self, optimizer: Any) -> None:
        self._scaler_stepped = True
        self._on_step(optimizer)

    def _wrap_scaler_step(self, usual: Any) -> Any:
        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            self._scaler_stepped = False
            self._post_backward.on_scaler_step(optimizer)
            returned = usual(scaler, optimizer, *args, **kwargs)
            if not self._scaler_stepped:
                self.skipped_steps += 1
                self._report_step(optimizer)
            return returned

        return step

    def _wrap_optimizer_init(self, usual: Any) -> Any:
        def construct(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            self._has_optimizer = True
            usual(optimizer, *args, **kwargs)

        return construct

    def _wrap_backward(self, usual: Any) -> Any:
        """The outermost one is a step: reentrant checkpoints make others inside it."""

        def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            self.on_compute()
            top = not self._depth
            outermost = top and not self._has_optimizer
            self._backwards += outermost
            if self._backwards == BACKWARDS_WITHOUT_OPTIMIZER and not self._has_optimizer:
                self._backward_steps.find_parameters(tensors, nested=not outermost)
            if top:
                self._stepped_in_backward.clear()
            self._depth += 1
            try:
                usual(tensors, *args, **kwargs)
            finally:
                self._depth -= 1
            if outermost and self._backwards >= BACKWARDS_WITHOUT_OPTIMIZER:
                self._post_backward.all_reduce(self._backward_steps)
                self._report_step(self._backward_steps)
            for optimizer in tuple(self._stepped_in_backward) if top else ():
                self._report_step(optimizer)

        return backward


def _graph_leaves(losses: Sequence[Tensor]) -> Iterator[Tensor]:
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
