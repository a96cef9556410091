"""Batch functions of a script are defined under a decorator, wherever they are."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from nfold.instrument.hooks.patches import (
    BatchFunctionDecorator,
    GeneratorBatches,
    installed_decorator,
)

SOURCE = '''from __future__ import annotations
import contextlib


def batches(first: int, *, step=1):
    """Of numbers."""
    while True:
        first = (yield first) or first + step


def outer(seed):
    def batches():
        yield from (seed, seed + 1)
    return batches()


class Data:
    def batches(self):
        yield self

    @staticmethod
    def get_batch(seed):
        return next(seed)


@contextlib.contextmanager
def held():
    yield "held"
'''


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    file = tmp_path / "suspended_data.py"
    file.write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "suspended_data", raising=False)
    yield file
    left_over = installed_decorator()
    if left_over is not None:
        left_over.uninstall()


def _line(text: str) -> int:
    lines = SOURCE.splitlines()
    return next(at for at, line in enumerate(lines, 1) if line.strip().startswith(text))


def _imported(*wanted: str) -> tuple[ModuleType, BatchFunctionDecorator]:
    generators = BatchFunctionDecorator(wanted)
    generators.install()
    importlib.invalidate_caches()
    return importlib.import_module("suspended_data"), generators


def _named(file: Path, line: int, name: str) -> str:
    return f"{file}:{line} {name}"


def test_generator_of_an_imported_module_is_replaced(module: Path) -> None:
    data, generators = _imported(_named(module, _line("def batches(first"), "batches"))
    running = data.batches(3, step=2)
    assert isinstance(running, GeneratorBatches)
    assert [next(running), next(running)] == [3, 5]
    assert data.batches.__doc__ == "Of numbers."
    (code,) = generators.decorated
    generators.replacements[code] = lambda args, _: ("again", *args)
    assert next(running) == ("again", 3)
    generators.uninstall()
    assert next(running) == 7
    assert running.send(20) == 20
    running.close()
    assert list(running) == []
    assert installed_decorator() is None


@pytest.mark.parametrize(
    ("text", "name", "made"),
    [
        ("def batches():", "batches", lambda data: data.outer(4)),
        ("def batches(self):", "batches", lambda data: data.Data().batches()),
        ("@contextlib", "held", lambda data: data.held().gen),
    ],
)
def test_closures_methods_and_decorated_generators(
    module: Path, text: str, name: str, made: Any
) -> None:
    data, generators = _imported(_named(module, _line(text), name))
    assert isinstance(made(data), GeneratorBatches)
    assert len(generators.decorated) == 1
    with data.held() as held:
        assert held == "held"
    assert list(data.outer(4)) == [4, 5]
    generators.uninstall()


def test_function_is_replaced(module: Path) -> None:
    data, decorator = _imported(_named(module, _line("@staticmethod"), "get_batch"))
    numbers = iter(range(3))
    assert data.Data.get_batch(numbers) == 0
    (code,) = decorator.decorated
    decorator.replacements[code] = lambda args, batches: (*args, next(batches), next(batches))
    assert data.Data().get_batch(numbers) == (numbers, 1, 2)
    with pytest.raises(StopIteration):
        data.Data.get_batch(numbers)
    decorator.uninstall()


def test_function_key_has_line_and_name(module: Path) -> None:
    line = _line("def batches(first")
    wrong = (_named(module, line + 1, "batches"), _named(module, line, "batch"))
    data, generators = _imported(*wrong)
    assert isinstance(data.batches(1), Iterator)
    assert not isinstance(data.batches(1), GeneratorBatches)
    assert not generators.decorated
    generators.uninstall()


def test_no_pyc_file_is_written(module: Path) -> None:
    _, generators = _imported(_named(module, _line("def batches(first"), "batches"))
    generators.uninstall()
    assert not list(module.parent.glob("__pycache__/suspended_data*"))
    usual = importlib.reload(sys.modules["suspended_data"])
    assert not isinstance(usual.batches(1), GeneratorBatches)


def test_without_keys_nothing_is_patched() -> None:
    usual = SourceFileLoader.get_code
    generators = BatchFunctionDecorator(())
    generators.install()
    assert SourceFileLoader.get_code is usual
    assert installed_decorator() is None
    generators.uninstall()
