"""Steps of a training: optimizer steps, and marked updates of scripts without an optimizer."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from nfold.core.source_location import current_user_call, current_user_line
from nfold.engines.base import Task
from nfold.engines.interleaver import ActiveVariant
from nfold.engines.torch.communication.gradient_exchange import (
    BUCKET_BYTES,
    ExchangeWait,
    split_into_buckets,
)
from nfold.instrument import torch_private
from nfold.instrument.hooks.patches import Patches
from nfold.instrument.hooks.runtime_hooks import is_sparse
from nfold.instrument.rank_environment import RENDEZVOUS_VARIABLE

# A script that has made so many backward passes, for so long, without a torch optimizer has none.
MIN_BACKWARDS, STEP_SEARCH_S = 3, 10.0


class HandWrittenUpdate:
    """Takes the place of an optimizer if a script updates the parameters itself."""

    def __init__(self) -> None:
        self._parameters: dict[int, Tensor] = {}

    @property
    def param_groups(self) -> list[dict[str, list[Tensor]]]:
        return [{"params": [*self._parameters.values()]}]

    @property
    def has_parameters(self) -> bool:
        return bool(self._parameters)

    def add_inputs(self, inputs: Tensor | Sequence[Tensor]) -> None:
        tensors = (value for value in _as_sequence(inputs) if isinstance(value, Tensor))
        self._add(tensor for tensor in tensors if tensor.is_leaf)

    def add_leaves(self, losses: Tensor | Sequence[Tensor], *, nested: bool) -> None:
        """Add the leaves of a graph before it is freed.

        Inside a backward (``nested``), tensors that a checkpoint has detached are leaves as well.
        """
        leaves = _graph_leaves(_as_sequence(losses))
        self._add(leaf for leaf in leaves if isinstance(leaf, nn.Parameter) or not nested)

    def _add(self, tensors: Iterable[Tensor]) -> None:
        self._parameters.update((id(tensor), tensor) for tensor in tensors)


def _as_sequence(tensors: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
    return (tensors,) if isinstance(tensors, Tensor) else tensors


class OptimizerStepHooks:
    """Reports every optimizer step (``on_step``) and the begin of every backward (``on_compute``).

    A step that GradScaler skips counts, so that ranks stay in step; ``skipped_steps`` counts them.
    Optimizers that step within a backward are reported after it: its thread is no place to end a
    process. ``on_missing_step`` is called with the line of a backward if a script without a PyTorch
    optimizer marks no step either, ``before_step``, if given, with the optimizer before every step.
    """

    def __init__(
        self,
        post_backward: PostBackwardAllReduce,
        on_compute: Callable[[], None],
        on_step: Callable[[Any], None],
        on_missing_step: Callable[[str | None], None],
        exchange_wait: ExchangeWait,
        on_loss: Callable[[Any], None],
        before_step: Callable[[Any], None] | None = None,
    ) -> None:
        self._post_backward = post_backward
        self._on_loss = on_loss
        self._report_before_step = before_step
        self._exchange_wait = exchange_wait
        self.on_compute = on_compute
        self._on_step = on_step
        self._on_missing_step = on_missing_step
        self.skipped_steps, self.steps_in_backward = 0, False
        # user lines that construct optimizers, and the lines of packages that they call
        self.optimizer_calls: dict[tuple[str | None, str | None], None] = {}
        self._scaler_stepped = self._has_optimizer = self._has_marks = False
        self._depth = self._backwards = 0
        self._first_backward_s: float | None = None
        self._update = HandWrittenUpdate()
        self._step_depth = 0
        self._stepped_in_backward: list[Any] = []
        self._hooks: tuple[Any, ...] = ()

    def install(self, patches: Patches, warm_up: Patches) -> None:
        patches.wrap(Optimizer, "__init__", self._construct_optimizer)
        patches.wrap(torch.autograd, "backward", self._backward)
        warm_up.wrap(torch.autograd, "grad", self._grad)
        patches.wrap(GradScaler, "step", self._step_scaler)
        if self._exchange_wait.enabled:
            # In a forward, buffers are sent from rank 0, which waits for the others with gloo.
            wrapper, name = DistributedDataParallel, torch_private.SYNC_BUFFERS
            patches.wrap(wrapper, name, self._exchange_wait.add_call)
        self._hooks = (
            register_optimizer_step_pre_hook(lambda *_: self._before_step()),
            register_optimizer_step_post_hook(lambda optimizer, *_: self._after_step(optimizer)),
        )
        report = self._report_before_step
        if report is not None:
            before = register_optimizer_step_pre_hook(lambda optimizer, *_: report(optimizer))
            self._hooks = (*self._hooks, before)

    def uninstall(self) -> None:
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

    def _step_scaler(
        self, original: Any, scaler: Any, optimizer: Any, *args: Any, **kwargs: Any
    ) -> Any:
        self._scaler_stepped = False
        self._post_backward.on_scaler_step(optimizer)
        returned = original(scaler, optimizer, *args, **kwargs)
        if not self._scaler_stepped:
            self.skipped_steps += 1
            self._report_step(optimizer)
        return returned

    def _construct_optimizer(
        self, original: Any, optimizer: Any, *args: Any, **kwargs: Any
    ) -> None:
        self._has_optimizer = True
        self.optimizer_calls[current_user_call()] = None
        original(optimizer, *args, **kwargs)

    def _grad(self, original: Any, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if self._searches_parameters:
            self._update.add_inputs(inputs)
        return original(outputs, inputs, *args, **kwargs)

    def _backward(self, original: Any, tensors: Any, *args: Any, **kwargs: Any) -> None:
        self.on_compute()
        is_outermost = not self._depth
        if self._searches_parameters:
            self._update.add_leaves(tensors, nested=not is_outermost)
            self._check_for_steps()
        if is_outermost:
            self._stepped_in_backward.clear()
        self._depth += 1
        loss = tensors[0] if isinstance(tensors, list | tuple) and tensors else tensors
        if is_outermost:
            self._on_loss(loss)
        try:
            with self._exchange_wait.measure(loss) if is_outermost else nullcontext():
                original(tensors, *args, **kwargs)
        finally:
            self._depth -= 1
        for optimizer in tuple(self._stepped_in_backward) if is_outermost else ():
            self._report_step(optimizer)

    @property
    def _searches_parameters(self) -> bool:
        return not (self._has_optimizer or self._has_marks)

    def _check_for_steps(self) -> None:
        self._backwards += 1
        now = time.monotonic()
        self._first_backward_s = self._first_backward_s or now
        if self._backwards > MIN_BACKWARDS and now - self._first_backward_s > STEP_SEARCH_S:
            self._on_missing_step(current_user_line())

    def take_update(self) -> HandWrittenUpdate | None:
        """Return the update of a script without an optimizer at a mark, None if nothing trained."""
        if self._has_optimizer or not self._update.has_parameters:
            return None
        self._has_marks = True
        self._post_backward.all_reduce(self._update)
        return self._update


def _graph_leaves(losses: Sequence[Tensor]) -> Iterator[Tensor]:
    stack: list[Any] = [loss.grad_fn for loss in losses]
    visited: set[Any] = set()
    while stack:
        node = stack.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        stack += [following for following, _ in node.next_functions]


@dataclass
class OptimizerRole:
    """The role of an optimizer in a training: a later optimizer may take over the role.

    ``initial_parameters`` outlive the optimizer; ``last_step`` counts steps of any optimizer.
    """

    optimizer: ref[Any]
    initial_parameters: list[Tensor]
    steps: int = 0
    last_step: int = 0

    @property
    def parameters(self) -> list[Tensor]:
        optimizer = self.optimizer()
        return self.initial_parameters if optimizer is None else _parameters_of(optimizer)


class StepOptimizer:
    """Chooses the optimizer that ends a training step: the one that steps least often, then latest.

    It is chosen at the end of the warm-up. An optimizer that the script constructs later (for every
    epoch, fold or stage) takes over the role of one that was deleted; of one that trains the same
    parameters, or parameters of the same shapes; or of the chosen one, if that has stopped.
    """

    def __init__(self) -> None:
        self._roles: list[OptimizerRole] = []
        self._role_of: WeakKeyDictionary[Any, OptimizerRole] = WeakKeyDictionary()
        self._unassigned: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._chosen: OptimizerRole | None = None
        self._step_counter = itertools.count(1)

    @property
    def optimizers(self) -> list[Any]:
        return [role.optimizer() for role in self._live_roles()]

    @property
    def parameters(self) -> list[Tensor]:
        """The trained parameters, also after the optimizers were deleted."""
        roles = self._live_roles() or self._roles
        return [parameter for role in roles for parameter in role.parameters]

    @property
    def index(self) -> int:
        counts = [role.steps for role in self._live_roles()]
        return max(range(len(counts)), key=lambda index: (-counts[index], index), default=0)

    @property
    def has_stepped(self) -> bool:
        return bool(self._roles)

    def ends_step(self, optimizer: Any) -> bool:
        """Count a step of the optimizer; return whether it ends a training step.

        The first step of a second optimizer does not: its frequency is not known yet.
        """
        now = next(self._step_counter)
        role = self._role_of.get(optimizer) or self._assign_role(optimizer, now)
        if role is None:
            return False
        is_first = not role.steps
        role.steps, role.last_step = role.steps + 1, now
        if self._chosen is not None:
            return role is self._chosen
        return not (is_first and len(self._roles) > 1) and self._live_roles()[self.index] is role

    def end_warm_up(self) -> None:
        roles = self._live_roles()
        self._chosen = roles[self.index] if roles else None

    def _live_roles(self) -> list[OptimizerRole]:
        return [role for role in self._roles if role.optimizer() is not None]

    def _assign_role(self, optimizer: Any, now: int) -> OptimizerRole | None:
        chosen, first_step = self._chosen, self._unassigned.get(optimizer)
        if chosen is None or first_step is None:
            role = self._predecessor(optimizer)
        else:
            role = chosen if chosen.last_step < first_step else None
        if role is None and chosen is not None:
            self._unassigned[optimizer] = now
            return None
        if role is None:
            role = OptimizerRole(ref(optimizer), [])
            self._roles.append(role)
        role.optimizer, role.initial_parameters = ref(optimizer), _parameters_of(optimizer)
        self._role_of[optimizer] = role
        return role

    def _predecessor(self, optimizer: Any) -> OptimizerRole | None:
        parameters = _parameters_of(optimizer)
        shapes, ids = [p.shape for p in parameters], {id(p) for p in parameters}

        def same_shapes(role: OptimizerRole) -> bool:
            return [p.shape for p in role.initial_parameters] == shapes

        deleted = [role for role in self._roles if role.optimizer() is None]
        if deleted or self._chosen is None:
            return next(iter(sorted(deleted, key=same_shapes, reverse=True)), None)
        similar = [
            role
            for role in self._roles
            if same_shapes(role) or not ids.isdisjoint(map(id, role.initial_parameters))
        ]
        return min(similar, key=lambda role: role.last_step, default=None)


def _parameters_of(optimizer: Any) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


COMMUNICATION_TIMEOUT = timedelta(seconds=60)
UNTYPED_DIST: Any = dist
UNTYPED_C10D: Any = distributed_c10d  # Their stubs are incomplete.


class PostBackwardAllReduce:
    """All-reduces the gradients of independent replicas at once, before each optimizer step.

    This measures communication that does not overlap with backward. The replicas have no process
    group of the script: the group belongs to this variant.
    """

    def __init__(self, task: Task, variant: ActiveVariant) -> None:
        self._task = task
        self._variant = variant
        self._group: Any = None
        self._reduced_optimizer: Any = None
        self._hook: Any = None

    def install(self) -> None:
        if not self._variant.is_baseline("exchange_after_backward"):
            self._hook = register_optimizer_step_pre_hook(lambda opt, *_: self._before_step(opt))

    def uninstall(self) -> None:
        if self._hook is not None:
            self._hook.remove()

    def on_scaler_step(self, optimizer: Any) -> None:
        """All-reduce before a step of GradScaler: ranks that skip the step must take part."""
        if self._hook is not None:
            self.all_reduce(optimizer)
            self._reduced_optimizer = optimizer

    def _before_step(self, optimizer: Any) -> None:
        if self._reduced_optimizer is not optimizer:
            self.all_reduce(optimizer)
        self._reduced_optimizer = None

    def all_reduce(self, optimizer: Any) -> None:
        if not self._variant.current.exchange_after_backward:
            return
        trained: list[Any] = [p for p in _parameters_of(optimizer) if p.requires_grad]
        for bucket in split_into_buckets(trained, BUCKET_BYTES, BUCKET_BYTES):
            self._all_reduce_bucket(bucket)

    @torch.no_grad()
    def _all_reduce_bucket(self, parameters: Sequence[Tensor]) -> None:
        # Parameters without a gradient take part with zeros. Sparse gradients are sent as dense
        # tensors, and keep the values of this replica.
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        flat = torch.cat([g.to_dense().reshape(-1) for g in gradients])
        if self._group is None:
            self._group = self._create_group(flat.device)
        self._group.allreduce([flat]).wait()
        sizes = [gradient.numel() for gradient in gradients]
        sums = flat.split(sizes)  # type: ignore[no-untyped-call]
        for gradient, total in zip(gradients, sums, strict=True):
            if not is_sparse(gradient):
                gradient.copy_(total.view_as(gradient))

    def _create_group(self, device: torch.device) -> Any:
        host, _, port = os.environ[RENDEZVOUS_VARIABLE].rpartition(":")
        timeout = COMMUNICATION_TIMEOUT
        tcp_store = UNTYPED_DIST.TCPStore(host, int(port), is_master=False, timeout=timeout)
        store = UNTYPED_DIST.PrefixStore("nfold", tcp_store)
        rank, world = self._task.rank, self._task.world_size
        if device.type == "cuda":
            options = torch_private.nccl_options(timeout)
            return UNTYPED_C10D.ProcessGroupNCCL(store, rank, world, options)
        return UNTYPED_C10D.ProcessGroupGloo(store, rank, world, timeout)
