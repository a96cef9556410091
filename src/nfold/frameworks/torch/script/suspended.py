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
from nfold.place import display_filename

DECORATOR_NAME = "_nfold_generator"
"""A builtin that no script has."""


def function_key(code: CodeType) -> str:
    """``train.py:12 batches``: which function a code is of."""
    return _function_key(code.co_filename, code.co_firstlineno, code.co_name)


def _function_key(path: str, line: int, name: str) -> str:
    return f"{display_filename(path)}:{line} {name}"


class GeneratorHooks:
    """Defines these, as ``noted``, so that what they yield may be other batches (``give``)."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = frozenset(keys)
        self._files = {one.rpartition(":")[0] for one in keys}
        self._patches = Patches()
        self.decorated: set[CodeType] = set()
        self.replacements: dict[CodeType, Callable[[GeneratorBatches], Any]] = {}
        """What a generator's ``next`` is, by its code."""

    def install(self) -> None:
        """From now on, for what the script imports; its own file is compiled by ``compiled``."""
        if self._keys:
            setattr(builtins, DECORATOR_NAME, self)
            self._patches.put(SourceFileLoader, "get_code", self._wrap_get_code)

    def uninstall(self) -> None:
        """Let modules be loaded as usual; what was defined yields its own batches."""
        self._patches.undo()
        self.replacements.clear()
        if installed_generator_hooks() is self:
            delattr(builtins, DECORATOR_NAME)

    def compile_source(self, source: bytes, path: str) -> CodeType:
        """The code of a file, with those of the functions decorated that it defines."""
        if display_filename(path) not in self._files:
            return execute.compile_source(source, path)
        tree = ast.parse(source, path)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and self._matches(node, path):
                decorator = ast.copy_location(ast.Name(DECORATOR_NAME, ast.Load()), node)
                node.decorator_list.append(decorator)
        return compile(tree, path, "exec", dont_inherit=True)

    def _matches(self, node: ast.FunctionDef, path: str) -> bool:
        first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
        return _function_key(path, first, node.name) in self._keys

    def _wrap_get_code(self, usual: Any) -> Any:
        def get_code(loader: SourceFileLoader, fullname: str) -> CodeType | None:
            path = loader.get_filename(fullname)
            if display_filename(path) not in self._files:
                code: CodeType | None = usual(loader, fullname)
                return code
            # Never from a cache of compiled files, nor into it.
            return self.compile_source(loader.get_data(path), path)

        return get_code

    def __call__(self, function: Callable[..., Iterator[Any]]) -> Callable[..., GeneratorBatches]:
        """Decorate one of the functions."""
        code: CodeType = function.__code__
        self.decorated.add(code)

        @functools.wraps(function)
        def started(*args: Any, **kwargs: Any) -> GeneratorBatches:
            return GeneratorBatches(function(*args, **kwargs), code, args, self.replacements)

        return started


def installed_generator_hooks() -> GeneratorHooks | None:
    """Those of this process's script."""
    return getattr(builtins, DECORATOR_NAME, None)


class GeneratorBatches(Iterator[Any]):
    """A generator, or what is given instead; sent values and exceptions go to the generator."""

    def __init__(
        self,
        generator: Iterator[Any],
        code: CodeType,
        args: tuple[Any, ...],
        replacements: dict[CodeType, Callable[[GeneratorBatches], Any]],
    ) -> None:
        self.generator = generator
        self.code = code
        self.args = args
        self._replacements = replacements

    def __next__(self) -> Any:
        """The next batch."""
        give = self._replacements.get(self.code)
        return next(self.generator) if give is None else give(self)

    def __getattr__(self, name: str) -> Any:
        """``send``, ``throw``, ``close``."""
        return getattr(self.generator, name)
