"""Replacing attributes of PyTorch and trainers, and restoring them. Imports no torch."""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

from nfold.core.import_hooks import ImportCallback
from nfold.core.script_profile import TrainerKind
from nfold.core.source_location import current_user_line, display_filename
from nfold.engines import rank_process

Replacement = Callable[[tuple[Any, ...], Iterator[Any]], Any]  # of the next batch
PatchFactory = Callable[[Any], Any]  # from the original attribute to its replacement


@dataclass(frozen=True, eq=False)
class Patch:
    """A replaced attribute; ``inherited`` from a base class of its owner."""

    owner: Any
    name: str
    original: Any
    inherited: bool
    patches: Patches


class Patches:
    """Attributes of classes and modules that are replaced together, and restored together.

    All of a process are in one ``stack``, in order of replacement. docs/patches.md lists them.
    """

    stack: ClassVar[list[Patch]] = []

    def put(self, owner: Any, name: str, factory: PatchFactory) -> None:
        """Replace an attribute by ``factory(original)``; do nothing if it does not exist."""
        original = getattr(owner, name, None)
        if original is None:
            return
        self.stack.append(Patch(owner, name, original, name not in vars(owner), self))
        setattr(owner, name, factory(original))

    def wrap(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        """Replace a function or method by ``function(original, *args, **kwargs)``."""

        def factory(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def replacement(*args: Any, **kwargs: Any) -> Any:
                return function(original, *args, **kwargs)

            return replacement

        self.put(owner, name, factory)

    def undo(self) -> None:
        """Restore all attributes in reverse order; delete those that a class had inherited."""
        for patch in [patch for patch in reversed(self.stack) if patch.patches is self]:
            self.stack.remove(patch)
            if patch.inherited:
                delattr(patch.owner, patch.name)
            else:
                setattr(patch.owner, patch.name, patch.original)


# By module: the class, the method to wrap, the trainer.
TRAINER_CLASSES = {
    "transformers.training_args": ("TrainingArguments", "__post_init__", "transformers"),
    "lightning.pytorch.trainer.trainer": ("Trainer", "__init__", "lightning"),
    "pytorch_lightning.trainer.trainer": ("Trainer", "__init__", "lightning"),
    "lightning.fabric.fabric": ("Fabric", "__init__", "fabric"),
    "lightning_fabric.fabric": ("Fabric", "__init__", "fabric"),
    "accelerate.accelerator": ("Accelerator", "__init__", "accelerate"),
}
WITH_DEVICE_COUNT = ("lightning", "fabric")  # trainers whose constructor takes a number of devices
# an earlier trainer may use a later one
OUTERMOST_FIRST: tuple[TrainerKind, ...] = ("transformers", "lightning", "fabric", "accelerate")


def holders(name: str, function: Any, *homes: ModuleType) -> list[ModuleType]:
    """Return the modules to patch: ``homes``, and those that imported ``function`` from them.

    Before that, with ``from torch.distributed import ...``, under its own name.
    """
    return [
        *homes,
        *(
            module
            for module in list(sys.modules.values())
            if isinstance(module, ModuleType)
            and module not in homes
            and vars(module).get(name) is function
        ),
    ]


def wrap_everywhere(
    patches: Patches, name: str, function: Callable[..., Any], *homes: ModuleType
) -> None:
    """Wrap a function of ``homes`` there and in all modules that have imported it."""
    for owner in holders(name, getattr(homes[0], name), *homes):
        patches.wrap(owner, name, function)


class TrainerDetector:
    """Records which trainer classes the script instantiates, and where.

    Sets the number of devices of each to ``world_size``: Lightning refuses ``devices=2`` in a run
    on one device.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._creation_lines: dict[str, str | None] = {}

    def import_actions(self, patches: Patches) -> dict[str, ImportCallback]:
        """Return the functions to call after the imports of the trainers' modules."""
        return dict.fromkeys(TRAINER_CLASSES, functools.partial(self._patch_trainer, patches))

    @property
    def used(self) -> TrainerKind:
        return next((name for name in OUTERMOST_FIRST if name in self._creation_lines), "")

    @property
    def creation_line(self) -> str | None:
        return self._creation_lines.get(self.used)

    def _patch_trainer(self, patches: Patches, module: ModuleType) -> None:
        name, method, kind = TRAINER_CLASSES[module.__name__]
        counted = kind in WITH_DEVICE_COUNT
        overrides = {"devices": self._world_size, "num_nodes": 1} if counted else {}

        def construct(original: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
            self._creation_lines.setdefault(kind, current_user_line())
            return original(trainer, *args, **{**kwargs, **overrides})

        patches.wrap(getattr(module, name), method, construct)


if TYPE_CHECKING:
    from torch import nn

TENSOR_PARALLEL_MODULE = "torch.distributed.tensor.parallel"
TENSOR_PARALLEL_MARK = "_nfold_divided"  # attribute of a module


def is_tensor_parallel(models: Iterable[nn.Module]) -> bool:
    return any(TENSOR_PARALLEL_MARK in vars(part) for model in models for part in model.modules())


def mark_parallelized(patches: Patches, module: ModuleType) -> None:
    """Mark tensor-parallel modules: their parameters are DTensors, as under FSDP2."""

    def parallelize_module(original: Any, *args: Any, **kwargs: Any) -> Any:
        parallelized = original(*args, **kwargs)
        vars(parallelized)[TENSOR_PARALLEL_MARK] = True
        return parallelized

    patches.wrap(module, "parallelize_module", parallelize_module)


DECORATOR_NAME = "_nfold_batch_function"  # name of a builtin


def function_key(path: str, line: int, name: str) -> str:
    """Return ``train.py:12 batches``: file, line and name of a function."""
    return f"{display_filename(path)}:{line} {name}"


class BatchFunctionDecorator:
    """Decorates batch functions at their definition, so that their batches can be replaced.

    The probe run finds the batch functions (``keys``, see ``function_key``), and later runs define
    them decorated: a function may be imported under several names, and a running generator cannot
    be given other code. A replacement gets the arguments of the call and an iterator of batches.

    ``sources`` are files that are read in place of others: an edited copy is run as the original.
    """

    def __init__(self, keys: Sequence[str], sources: Sequence[tuple[str, str]] = ()) -> None:
        self._keys = frozenset(keys)
        self._sources = {os.path.realpath(path): copy for path, copy in sources}
        self._files = {key.rpartition(":")[0] for key in keys}
        self._patches = Patches()
        self.decorated: set[CodeType] = set()
        self.replacements: dict[CodeType, Replacement] = {}

    def install(self) -> None:
        """Decorate functions of later imports. The script itself uses ``compile_source``."""
        if self._keys:
            setattr(builtins, DECORATOR_NAME, self)
        if self._keys or self._sources:
            self._patches.wrap(SourceFileLoader, "get_code", self._get_code)

    def uninstall(self) -> None:
        """Import modules as original again; decorated functions make their own batches."""
        self._patches.undo()
        self.replacements.clear()
        if installed_decorator() is self:
            delattr(builtins, DECORATOR_NAME)

    def compile_source(self, source: bytes, path: str) -> CodeType:
        """Compile a file, or what is read in its place, with its listed functions decorated."""
        copy = self._sources.get(os.path.realpath(path))
        source = source if copy is None else Path(copy).read_bytes()
        if display_filename(path) not in self._files:
            return rank_process.compile_source(source, path)
        tree = ast.parse(source, path)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                if function_key(path, first, node.name) in self._keys:
                    decorator = ast.copy_location(ast.Name(DECORATOR_NAME, ast.Load()), node)
                    node.decorator_list.append(decorator)
        return compile(tree, path, "exec", dont_inherit=True)

    def _get_code(self, original: Any, loader: SourceFileLoader, fullname: str) -> Any:
        path = loader.get_filename(fullname)
        if (
            display_filename(path) not in self._files
            and os.path.realpath(path) not in self._sources
        ):
            return original(loader, fullname)
        # Neither reads nor writes a cached .pyc file.
        return self.compile_source(loader.get_data(path), path)

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        code: CodeType = function.__code__
        self.decorated.add(code)

        @functools.wraps(function)
        def generate(*args: Any, **kwargs: Any) -> GeneratorBatches:
            return GeneratorBatches(function(*args, **kwargs), code, args, self.replacements)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            replacement = self.replacements.get(code)
            if replacement is None:
                return function(*args, **kwargs)
            return replacement(args, RepeatedCalls(functools.partial(function, *args, **kwargs)))

        return generate if code.co_flags & inspect.CO_GENERATOR else call


def installed_decorator() -> BatchFunctionDecorator | None:
    return getattr(builtins, DECORATOR_NAME, None)


@dataclass(eq=False)
class RepeatedCalls(Iterator[Any]):
    """The results of calls of a function; unlike a generator it passes StopIteration on."""

    function: Callable[[], Any]

    def __next__(self) -> Any:
        return self.function()


@dataclass(eq=False)
class GeneratorBatches(Iterator[Any]):
    """A generator whose ``next`` can be replaced; values and exceptions sent to it pass through."""

    generator: Iterator[Any]
    code: CodeType
    args: tuple[Any, ...]
    replacements: dict[CodeType, Replacement]

    def __next__(self) -> Any:
        replacement = self.replacements.get(self.code)
        if replacement is None:
            return next(self.generator)
        return replacement(self.args, self.generator)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.generator, name)
