"""Calls functions right after modules are imported for the first time. Imports no torch.

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
    """Calls ``callbacks[name]`` once with the module of that name, right after it was executed."""

    def __init__(self, callbacks: dict[str, ImportCallback]) -> None:
        self._callbacks = dict(callbacks)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        callback = self._callbacks.pop(fullname, None)
        if callback is None:
            return None
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            _wrap_exec_module(spec.loader, callback)
        return spec


def call_after_import(callbacks: dict[str, ImportCallback]) -> PostImportFinder:
    """Call each callback with its module: at once if it is imported, else when it will be."""
    waiting = {name: call for name, call in callbacks.items() if name not in sys.modules}
    finder = PostImportFinder(waiting)
    sys.meta_path.insert(0, finder)
    for name in set(callbacks) - set(waiting):
        callbacks[name](sys.modules[name])
    return finder


def _wrap_exec_module(loader: Any, callback: ImportCallback) -> None:
    execute = loader.exec_module

    def execute_and_call(module: ModuleType) -> None:
        vars(loader).pop("exec_module", None)
        execute(module)
        callback(module)

    loader.exec_module = execute_and_call
