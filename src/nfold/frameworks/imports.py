"""Doing something right after a module was imported for the first time. Imports no torch.

A script decides when it imports torch, and what it puts into the environment before that.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Action = Callable[[ModuleType], None]


class AfterImport(MetaPathFinder):
    """Calls ``actions[name]`` with each module right after it was executed, once."""

    def __init__(self, actions: dict[str, Action]) -> None:
        self._actions = dict(actions)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The usual spec, whose loader also acts; None for all other modules."""
        del path, target
        action = self._actions.pop(fullname, None)
        if action is None:
            return None
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            _then(spec.loader, action)
        return spec


def after_import(actions: dict[str, Action]) -> AfterImport:
    """Act on these modules: at once where they are imported already, else when they will be."""
    waiting = {name: action for name, action in actions.items() if name not in sys.modules}
    finder = AfterImport(waiting)
    sys.meta_path.insert(0, finder)
    for name in set(actions) - set(waiting):
        actions[name](sys.modules[name])
    return finder


def _then(loader: Any, action: Action) -> None:
    """Let this loader's next module be acted on. The loader stays the object that it is."""
    execute = loader.exec_module

    def executed(module: ModuleType) -> None:
        vars(loader).pop("exec_module", None)
        execute(module)
        action(module)

    loader.exec_module = executed
