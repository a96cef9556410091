"""Which optimizer's steps are the steps of a training that has several."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch import Tensor


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
        """The role of an optimizer that steps for the first time, or that had none; or None."""
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
        """That of the one whose place it takes, of several the one that is its turn."""
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
    """Whether they have the same shapes."""
    return [one.shape for one in some] == [one.shape for one in others]


def _share_parameters(some: list[Tensor], others: list[Tensor]) -> bool:
    """Whether one is among both."""
    return not {id(one) for one in some}.isdisjoint(id(one) for one in others)
