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

ImportCallback = Callable[[ModuleType], None]


class PostImportFinder(MetaPathFinder):
    """Calls ``actions[name]`` with each module right after it was executed, once."""

    def __init__(self, callbacks: dict[str, ImportCallback]) -> None:
        self._callbacks = dict(callbacks)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The usual spec, whose loader also acts; None for all other modules."""
        del path, target
        action = self._callbacks.pop(fullname, None)
        if action is None:
            return None
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            _wrap_exec_module(spec.loader, action)
        return spec


def call_after_import(callbacks: dict[str, ImportCallback]) -> PostImportFinder:
    """Act on these modules: at once where they are imported already, else when they will be."""
    waiting = {name: action for name, action in callbacks.items() if name not in sys.modules}
    finder = PostImportFinder(waiting)
    sys.meta_path.insert(0, finder)
    for name in set(callbacks) - set(waiting):
        callbacks[name](sys.modules[name])
    return finder


def _wrap_exec_module(loader: Any, action: ImportCallback) -> None:
    execute = loader.exec_module

    def executed(module: ModuleType) -> None:
        vars(loader).pop("exec_module", None)
        execute(module)
        action(module)

    loader.exec_module = executed
