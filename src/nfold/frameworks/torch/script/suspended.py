"""Generators of the script's own that make its batches: under a decorator from their definition on.

What is suspended in the middle of its code cannot be given another one. So a first look tells which
functions they are, and later runs define them decorated. Imports no torch.
"""

from __future__ import annotations

import ast
import builtins
import functools
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import SourceFileLoader
from types import CodeType
from typing import Any

from nfold.frameworks import execute
from nfold.frameworks.torch.script.patches import Patches
from nfold.place import shown

NAME = "_nfold_generator"
"""A builtin that no script has."""


def noted(code: CodeType) -> str:
    """``train.py:12 batches``: which function a code is of."""
    return _noted(code.co_filename, code.co_firstlineno, code.co_name)


def _noted(path: str, line: int, name: str) -> str:
    return f"{shown(path)}:{line} {name}"


class Generators:
    """Defines these, as ``noted``, so that what they yield may be other batches (``give``)."""

    def __init__(self, wanted: Sequence[str]) -> None:
        self._wanted = frozenset(wanted)
        self._files = {one.rpartition(":")[0] for one in wanted}
        self._patches = Patches()
        self.defined: set[CodeType] = set()
        self.give: dict[CodeType, Callable[[Batches], Any]] = {}
        """What a generator's ``next`` is, by its code."""

    def install(self) -> None:
        """From now on, for what the script imports; its own file is compiled by ``compiled``."""
        if self._wanted:
            setattr(builtins, NAME, self)
            self._patches.put(SourceFileLoader, "get_code", self._loading)

    def remove(self) -> None:
        """Let modules be loaded as usual; what was defined yields its own batches."""
        self._patches.undo()
        self.give.clear()
        if here() is self:
            delattr(builtins, NAME)

    def compiled(self, source: bytes, path: str) -> CodeType:
        """The code of a file, with those of the functions decorated that it defines."""
        if shown(path) not in self._files:
            return execute.compiled(source, path)
        tree = ast.parse(source, path)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and self._wants(node, path):
                decorator = ast.copy_location(ast.Name(NAME, ast.Load()), node)
                node.decorator_list.append(decorator)
        return compile(tree, path, "exec", dont_inherit=True)

    def _wants(self, node: ast.FunctionDef, path: str) -> bool:
        first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
        return _noted(path, first, node.name) in self._wanted

    def _loading(self, usual: Any) -> Any:
        def get_code(loader: SourceFileLoader, fullname: str) -> CodeType | None:
            path = loader.get_filename(fullname)
            if shown(path) not in self._files:
                code: CodeType | None = usual(loader, fullname)
                return code
            # Never from a cache of compiled files, nor into it.
            return self.compiled(loader.get_data(path), path)

        return get_code

    def __call__(self, function: Callable[..., Iterator[Any]]) -> Callable[..., Batches]:
        """Decorate one of the functions."""
        code: CodeType = function.__code__
        self.defined.add(code)

        @functools.wraps(function)
        def started(*args: Any, **kwargs: Any) -> Batches:
            return Batches(function(*args, **kwargs), code, args, self.give)

        return started


def here() -> Generators | None:
    """Those of this process's script."""
    return getattr(builtins, NAME, None)


class Batches(Iterator[Any]):
    """A generator, or what is given instead; sent values and exceptions go to the generator."""

    def __init__(
        self,
        real: Iterator[Any],
        code: CodeType,
        args: tuple[Any, ...],
        give: dict[CodeType, Callable[[Batches], Any]],
    ) -> None:
        self.real = real
        self.code = code
        self.args = args
        self._give = give

    def __next__(self) -> Any:
        """The next batch."""
        give = self._give.get(self.code)
        return next(self.real) if give is None else give(self)

    def __getattr__(self, name: str) -> Any:
        """``send``, ``throw``, ``close``."""
        return getattr(self.real, name)
