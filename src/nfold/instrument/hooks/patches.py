"""Wrappers put in place of functions and methods of PyTorch's, and taken away again."""

from __future__ import annotations

import ast
import builtins
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.machinery import SourceFileLoader
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any

from nfold.core.import_hooks import ImportCallback
from nfold.core.script_profile import TrainerKind
from nfold.core.source_location import current_user_line, display_filename
from nfold.engines import rank_process

PatchFactory = Callable[[Any], Any]
"""From what stood there to what stands there now."""


class Patches:
    """Attributes that were replaced, in order."""

    def __init__(self) -> None:
        self._undo_stack: list[tuple[Any, str, Any, bool]] = []

    def put(self, owner: Any, name: str, factory: PatchFactory) -> None:
        """Replace an attribute of a class or module; one that does not exist is left alone."""
        before = getattr(owner, name, None)
        if before is None:
            return
        self._undo_stack.append((owner, name, before, name in vars(owner)))
        setattr(owner, name, factory(before))

    def undo(self) -> None:
        """Put everything back, the last first; what a class inherits it inherits again."""
        while self._undo_stack:
            owner, name, before, own = self._undo_stack.pop()
            if own:
                setattr(owner, name, before)
            else:
                delattr(owner, name)


TRAINER_CLASSES = {
    "transformers.training_args": ("TrainingArguments", "__post_init__", "transformers"),
    "lightning.pytorch.trainer.trainer": ("Trainer", "__init__", "lightning"),
    "pytorch_lightning.trainer.trainer": ("Trainer", "__init__", "lightning"),
    "lightning.fabric.fabric": ("Fabric", "__init__", "fabric"),
    "lightning_fabric.fabric": ("Fabric", "__init__", "fabric"),
    "accelerate.accelerator": ("Accelerator", "__init__", "accelerate"),
}
"""By the module that defines it: the class that takes the settings, what makes one, whose it is."""
WITH_DEVICE_COUNT = ("lightning", "fabric")
"""Those that are told a number of devices in the script."""
OUTERMOST_FIRST: tuple[TrainerKind, ...] = ("transformers", "lightning", "fabric", "accelerate")
"""An earlier one may use a later one."""


class TrainerDetector:
    """Those that a script has made so far.

    ``world_size`` is how many devices each is told to use, whatever the script says: ``devices=2``
    in a script that runs on one device alone is refused by Lightning.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._creation_lines: dict[str, str | None] = {}

    def import_actions(self) -> dict[str, ImportCallback]:
        """What to do after the import of each module that defines one."""
        return dict.fromkeys(TRAINER_CLASSES, self._patch_trainer)

    @property
    def used(self) -> TrainerKind:
        """The outermost that the script has made, empty without one."""
        return next((name for name in OUTERMOST_FIRST if name in self._creation_lines), "")

    @property
    def creation_line(self) -> str | None:
        """Where in the user's code it was first made, None where that is not known."""
        return self._creation_lines.get(self.used)

    def _patch_trainer(self, module: ModuleType) -> None:
        name, method, whose = TRAINER_CLASSES[module.__name__]
        owner = getattr(module, name)
        told = {"devices": self._world_size, "num_nodes": 1} if whose in WITH_DEVICE_COUNT else {}
        setattr(owner, method, self._wrap_init(getattr(owner, method), whose, told))

    def _wrap_init(
        self, original: Callable[..., Any], kind: str, overrides: dict[str, int]
    ) -> Callable[..., Any]:
        @functools.wraps(original)
        def make(made: Any, *args: Any, **kwargs: Any) -> Any:
            self._creation_lines.setdefault(kind, current_user_line())
            return original(made, *args, **{**kwargs, **overrides})

        return make


if TYPE_CHECKING:
    from torch import nn

TENSOR_PARALLEL_MODULE = "torch.distributed.tensor.parallel"
TENSOR_PARALLEL_MARK = "_nfold_divided"
"""An attribute of a module that is."""


def tensor_parallel_import_actions() -> dict[str, Callable[[ModuleType], None]]:
    """What to do when a script imports what divides a model: FSDP's tensors look the same."""
    return {TENSOR_PARALLEL_MODULE: _mark_parallelized}


def is_tensor_parallel(models: Iterable[nn.Module]) -> bool:
    """Whether any part of these is."""
    return any(TENSOR_PARALLEL_MARK in vars(part) for model in models for part in model.modules())


def _mark_parallelized(module: ModuleType) -> None:
    usual = module.parallelize_module

    @functools.wraps(usual)
    def parallelize_module(*args: Any, **kwargs: Any) -> Any:
        found = usual(*args, **kwargs)
        vars(found)[TENSOR_PARALLEL_MARK] = True
        return found

    vars(module)["parallelize_module"] = parallelize_module


# Generators of the script's own that make its batches: under a decorator from their definition on.
#
# What is suspended in the middle of its code cannot be given another one. So a first look tells which
# functions they are, and later runs define them decorated. Imports no torch.

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
            return rank_process.compile_source(source, path)
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
        give = self._replacements.get(self.code)
        return next(self.generator) if give is None else give(self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.generator, name)
