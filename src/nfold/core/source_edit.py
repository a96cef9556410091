"""Changes of a user's source that keep a remedy: values that say what to change and where.

``nfold.tune.source_patch`` makes them a unified diff. Expressions and statements are Python source.
A location is a line, ``train.py:31``, or a line and a column from 1, ``train.py:31:12``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class SetKeywords:
    """Set keyword arguments of a call.

    ``location`` is a line of the call, ``train.py:31``; ``function`` the last name of what is called
    there, ``DataLoader``; ``keywords`` are names and expressions. An argument that the call passes
    by position is replaced there. With ``every_call``, the line may have several calls, which are
    all edited: ``x, y = x.to(device), y.to(device)``.
    """

    location: str
    function: str
    keywords: tuple[tuple[str, str], ...]
    every_call: bool = False


@dataclass(frozen=True, kw_only=True)
class WrapExpression:
    """Replace the value that the statement at ``location`` assigns; ``{}`` is the old expression.

    After a statement such as ``model.to(device)``, which assigns nothing, a new one assigns
    ``model``. With ``functions``, such as ``("to", "cuda")``, the call of such a method there is
    wrapped in place of the value. ``imports`` as in AddStatement.
    """

    location: str
    template: str
    functions: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class AddStatement:
    """Add a statement before or after the one at ``location``, with its indentation.

    ``{target}`` in it is the model that the statement there assigns or moves: ``model`` of
    ``model = Net()`` and of ``model.to(device)``, and ``model.module`` of
    ``model = DistributedDataParallel(Net().to(device))``. ``{assigned}`` is the name that the statement
    gives to its value. ``imports`` are statements that it needs at the top of the file, unless they
    are there.
    """

    location: str
    statement: str
    place: Literal["before", "after"] = "after"
    imports: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ReplaceExpression:
    """Replace the expression ``old``, which begins at ``location`` with its column, by ``new``."""

    location: str
    old: str
    new: str


@dataclass(frozen=True, kw_only=True)
class RemoveStatement:
    """Remove the statement at ``location``; ``pass`` replaces it if its block has no other."""

    location: str


@dataclass(frozen=True, kw_only=True)
class GuardStatement:
    """Execute the statement at ``location`` only if ``condition`` is true."""

    location: str
    condition: str


@dataclass(frozen=True, kw_only=True)
class ExchangeOnce:
    """Exchange gradients only in the last backward of a step of several batches.

    ``location`` is the step of the optimizer. The condition on which the loop makes it becomes
    ``model.require_backward_grad_sync`` before each batch.
    """

    location: str


@dataclass(frozen=True, kw_only=True)
class AddUpOnDevice:
    """Add tensors up in a loop: ``total += loss.item()`` at ``location``. The sum is read after it."""

    location: str


@dataclass(frozen=True, kw_only=True)
class SetVariable:
    """Set an environment variable of the command that starts the script."""

    name: str
    value: str


FileEdit = (
    SetKeywords
    | WrapExpression
    | AddStatement
    | ReplaceExpression
    | RemoveStatement
    | GuardStatement
    | ExchangeOnce
    | AddUpOnDevice
)
SourceEdit = FileEdit | SetVariable
