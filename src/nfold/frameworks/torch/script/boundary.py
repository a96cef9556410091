"""Which optimizer's steps are the steps of a training that has several."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch import Tensor


@dataclass
class Role:
    """What one optimizer does in a training, or one after the other: ``latest`` is the last.

    ``trained`` are its parameters as it began, which outlive it, ``at`` is when it stepped last.
    """

    latest: ref[Any]
    trained: list[Tensor]
    steps: int = 0
    at: int = 0

    @property
    def parameters(self) -> list[Tensor]:
        """What is trained now, or was."""
        optimizer = self.latest()
        return self.trained if optimizer is None else _trained(optimizer)


class Boundary:
    """The optimizer that steps least often; of those that step equally often, the last in turn.

    Found while the training warms up, kept from ``settle`` on. One that a script makes anew takes
    the place of the one before (in every epoch, for every fold, for a second stage of training): of
    one that is gone; or, once it is settled, of one that trains the same parameters or as many of
    the same shapes; or of the one whose steps are counted, where that does not step any more.
    """

    def __init__(self) -> None:
        self._roles: list[Role] = []
        self._role_of: WeakKeyDictionary[Any, Role] = WeakKeyDictionary()
        self._strange: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._settled: Role | None = None
        self._now = itertools.count(1)

    @property
    def optimizers(self) -> list[Any]:
        """Those that step, in the order of their first steps."""
        return [role.latest() for role in self._alive()]

    @property
    def parameters(self) -> list[Tensor]:
        """What these train; of a script that has ended, what they did."""
        roles = self._alive() or self._roles
        return [parameter for role in roles for parameter in role.parameters]

    @property
    def chosen(self) -> int:
        """Its place in ``optimizers``."""
        counts = [role.steps for role in self._alive()]
        return max(range(len(counts)), key=lambda place: (-counts[place], place))

    def ends(self, optimizer: Any) -> bool:
        """Note a step of the optimizer: whether it ends a step of the training.

        The first step of another optimizer does not: it is not yet known how often it comes.
        """
        now = next(self._now)
        role = self._role_of.get(optimizer) or self._place(optimizer, now)
        if role is None:
            return False
        fresh = not role.steps
        role.steps, role.at = role.steps + 1, now
        if self._settled is not None:
            return role is self._settled
        return not (fresh and len(self._roles) > 1) and self._alive()[self.chosen] is role

    def settle(self) -> None:
        """Keep the one that is chosen."""
        self._settled = self._alive()[self.chosen]

    def _alive(self) -> list[Role]:
        return [role for role in self._roles if role.latest() is not None]

    def _place(self, optimizer: Any, now: int) -> Role | None:
        """The role of an optimizer that steps for the first time, or that had none; or None."""
        settled, stepped_at = self._settled, self._strange.get(optimizer)
        if settled is None or stepped_at is None:
            role = self._before(optimizer)
        else:
            role = settled if settled.at < stepped_at else None
        if role is None and settled is not None:
            self._strange[optimizer] = now
            return None
        if role is None:
            role = Role(ref(optimizer), [])
            self._roles.append(role)
        role.latest, role.trained = ref(optimizer), _trained(optimizer)
        self._role_of[optimizer] = role
        return role

    def _before(self, optimizer: Any) -> Role | None:
        """That of the one whose place it takes, of several the one that is its turn."""
        own, gone = _trained(optimizer), [role for role in self._roles if role.latest() is None]
        alike = [role for role in gone if _alike(role.trained, own)]
        if gone or self._settled is None:
            return next(iter([*alike, *gone]), None)
        same = [r for r in self._roles if _alike(r.trained, own) or _shared(r.trained, own)]
        return min(same, key=lambda role: role.at, default=None)


def _trained(optimizer: Any) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _alike(some: list[Tensor], others: list[Tensor]) -> bool:
    """Whether they have the same shapes."""
    return [one.shape for one in some] == [one.shape for one in others]


def _shared(some: list[Tensor], others: list[Tensor]) -> bool:
    """Whether one is among both."""
    return not {id(one) for one in some}.isdisjoint(id(one) for one in others)
