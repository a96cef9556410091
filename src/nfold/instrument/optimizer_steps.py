"""When a step of a training may end: an optimizer has stepped, or nothing of torch's ever does."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed import distributed_c10d
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from nfold.engines.base import Task
from nfold.engines.interleaver import ActiveVariant
from nfold.engines.torch.communication.gradient_exchange import BUCKET_BYTES, split_into_buckets
from nfold.instrument.hooks.patches import Patches
from nfold.instrument.hooks.runtime_hooks import is_sparse
from nfold.instrument.rank_environment import RENDEZVOUS_VARIABLE

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


@dataclass
class OptimizerRole:
    """What one optimizer does in a training, or one after the other: ``latest`` is the last.

    ``trained`` are its parameters as it began, which outlive it, ``at`` is when it stepped last.
    """

    optimizer: ref[Any]
    initial_parameters: list[Tensor]
    steps: int = 0
    last_step: int = 0

    @property
    def parameters(self) -> list[Tensor]:
        """What is trained now, or was."""
        optimizer = self.optimizer()
        return self.initial_parameters if optimizer is None else _parameters_of(optimizer)


class StepOptimizer:
    """The optimizer that steps least often; of those that step equally often, the last in turn.

    Found while the training warms up, kept from ``settle`` on. One that a script makes anew takes
    the place of the one before (in every epoch, for every fold, for a second stage of training): of
    one that is gone; or, once it is settled, of one that trains the same parameters or as many of
    the same shapes; or of the one whose steps are counted, where that does not step any more.
    """

    def __init__(self) -> None:
        self._roles: list[OptimizerRole] = []
        self._role_of: WeakKeyDictionary[Any, OptimizerRole] = WeakKeyDictionary()
        self._unassigned: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._chosen: OptimizerRole | None = None
        self._step_counter = itertools.count(1)

    @property
    def optimizers(self) -> list[Any]:
        """Those that step, in the order of their first steps."""
        return [role.optimizer() for role in self._live_roles()]

    @property
    def parameters(self) -> list[Tensor]:
        """What these train; of a script that has ended, what they did."""
        roles = self._live_roles() or self._roles
        return [parameter for role in roles for parameter in role.parameters]

    @property
    def index(self) -> int:
        """Its place in ``optimizers``."""
        counts = [role.steps for role in self._live_roles()]
        return max(range(len(counts)), key=lambda place: (-counts[place], place))

    def ends_step(self, optimizer: Any) -> bool:
        """Note a step of the optimizer: whether it ends a step of the training.

        The first step of another optimizer does not: it is not yet known how often it comes.
        """
        now = next(self._step_counter)
        role = self._role_of.get(optimizer) or self._assign_role(optimizer, now)
        if role is None:
            return False
        fresh = not role.steps
        role.steps, role.last_step = role.steps + 1, now
        if self._chosen is not None:
            return role is self._chosen
        return not (fresh and len(self._roles) > 1) and self._live_roles()[self.index] is role

    def end_warm_up(self) -> None:
        """Keep the one that is chosen."""
        self._chosen = self._live_roles()[self.index]

    def _live_roles(self) -> list[OptimizerRole]:
        return [role for role in self._roles if role.optimizer() is not None]

    def _assign_role(self, optimizer: Any, now: int) -> OptimizerRole | None:
        settled, stepped_at = self._chosen, self._unassigned.get(optimizer)
        if settled is None or stepped_at is None:
            role = self._predecessor(optimizer)
        else:
            role = settled if settled.last_step < stepped_at else None
        if role is None and settled is not None:
            self._unassigned[optimizer] = now
            return None
        if role is None:
            role = OptimizerRole(ref(optimizer), [])
            self._roles.append(role)
        role.optimizer, role.initial_parameters = ref(optimizer), _parameters_of(optimizer)
        self._role_of[optimizer] = role
        return role

    def _predecessor(self, optimizer: Any) -> OptimizerRole | None:
        own, gone = (
            _parameters_of(optimizer),
            [role for role in self._roles if role.optimizer() is None],
        )
        alike = [role for role in gone if _same_shapes(role.initial_parameters, own)]
        if gone or self._chosen is None:
            return next(iter([*alike, *gone]), None)
        same = [
            r
            for r in self._roles
            if _same_shapes(r.initial_parameters, own)
            or _share_parameters(r.initial_parameters, own)
        ]
        return min(same, key=lambda role: role.last_step, default=None)


def _parameters_of(optimizer: Any) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _same_shapes(some: list[Tensor], others: list[Tensor]) -> bool:
    return [one.shape for one in some] == [one.shape for one in others]


def _share_parameters(some: list[Tensor], others: list[Tensor]) -> bool:
    return not {id(one) for one in some}.isdisjoint(id(one) for one in others)


# Copies of a script exchange their gradients all at once, before each step of an optimizer.
#
# What a process a device would cost if nothing of the exchange were hidden behind backward. The
# copies know nothing of each other: the group is of this experiment alone.

COMMUNICATION_TIMEOUT = timedelta(seconds=60)


UNTYPED_DIST: Any = dist
UNTYPED_C10D: Any = distributed_c10d
"""Not everything in them is in their stubs."""


class PostBackwardAllReduce:
    """Stands in front of every optimizer's step, where an experiment asks for it at some time."""

    def __init__(self, task: Task, variant: ActiveVariant) -> None:
        self._task = task
        self._variant = variant
        self._group: Any = None
        self._reduced_optimizer: Any = None
        self._hook: Any = None

    def install(self) -> None:
        """Before the first step."""
        if not self._variant.is_baseline("exchange_after_backward"):
            self._hook = register_optimizer_step_pre_hook(lambda one, *_: self._before_step(one))

    def uninstall(self) -> None:
        """No more."""
        if self._hook is not None:
            self._hook.remove()

    def on_scaler_step(self, optimizer: Any) -> None:
        """A GradScaler's step begins: ranks that skip it must exchange as well."""
        if self._hook is not None:
            self.all_reduce(optimizer)
            self._reduced_optimizer = optimizer

    def _before_step(self, optimizer: Any) -> None:
        if self._reduced_optimizer is not optimizer:
            self.all_reduce(optimizer)
        self._reduced_optimizer = None

    def all_reduce(self, optimizer: Any) -> None:
        """The gradients of what an optimizer trains, or what stands for one."""
        if not self._variant.current.exchange_after_backward:
            return
        given = [p for group in optimizer.param_groups for p in group["params"]]
        own = [parameter for parameter in given if parameter.requires_grad]
        for bucket in split_into_buckets(own, BUCKET_BYTES, BUCKET_BYTES):
            self._all_reduce_bucket(bucket)

    @torch.no_grad()
    def _all_reduce_bucket(self, parameters: Sequence[Tensor]) -> None:
        """The sum over all copies; one that has no gradient takes part with zeros.

        Sparse gradients are sent as dense ones, and stay this copy's own.
        """
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        flat = torch.cat([g.to_dense().reshape(-1) for g in gradients])
        if self._group is None:
            self._group = self._create_group(flat.device)
        self._group.allreduce([flat]).wait()
        first = 0
        for gradient in gradients:
            own = flat[first : first + gradient.numel()]
            if not is_sparse(gradient):
                gradient.copy_(own.view_as(gradient))
            first += gradient.numel()

    def _create_group(self, device: torch.device) -> Any:
        host, _, port = os.environ[RENDEZVOUS_VARIABLE].rpartition(":")
        whole = UNTYPED_DIST.TCPStore(
            host, int(port), is_master=False, timeout=COMMUNICATION_TIMEOUT
        )
        store = UNTYPED_DIST.PrefixStore("nfold", whole)
        rank, world = self._task.rank, self._task.world_size
        if device.type == "cuda":
            options = UNTYPED_C10D.ProcessGroupNCCL.Options()
            options._timeout = COMMUNICATION_TIMEOUT
            return UNTYPED_C10D.ProcessGroupNCCL(store, rank, world, options)
        return UNTYPED_C10D.ProcessGroupGloo(store, rank, world, COMMUNICATION_TIMEOUT)
