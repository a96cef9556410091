"""Generators of a script are defined under a decorator, wherever they are, and stay themselves."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from nfold.frameworks.torch.script.suspended import Batches, Generators, here

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
    left_over = here()
    if left_over is not None:
        left_over.remove()


def _line(text: str) -> int:
    lines = SOURCE.splitlines()
    return next(at for at, line in enumerate(lines, 1) if line.strip().startswith(text))


def _imported(*wanted: str) -> tuple[ModuleType, Generators]:
    generators = Generators(wanted)
    generators.install()
    importlib.invalidate_caches()
    return importlib.import_module("suspended_data"), generators


def _named(file: Path, line: int, name: str) -> str:
    return f"{file}:{line} {name}"


def test_a_function_of_an_imported_module_gives_what_it_is_told(module: Path) -> None:
    data, generators = _imported(_named(module, _line("def batches(first"), "batches"))
    running = data.batches(3, step=2)
    assert isinstance(running, Batches)
    assert [next(running), next(running)] == [3, 5]
    assert data.batches.__doc__ == "Of numbers."
    (code,) = generators.defined
    generators.give[code] = lambda asked: ("again", *asked.args)
    assert next(running) == ("again", 3)
    generators.remove()
    assert next(running) == 7
    assert running.send(20) == 20
    running.close()
    assert list(running) == []
    assert here() is None


@pytest.mark.parametrize(
    ("text", "name", "made"),
    [
        ("def batches():", "batches", lambda data: data.outer(4)),
        ("def batches(self):", "batches", lambda data: data.Data().batches()),
        ("@contextlib", "held", lambda data: data.held().gen),
    ],
)
def test_closures_methods_and_decorated_ones_are_found(
    module: Path, text: str, name: str, made: Any
) -> None:
    data, generators = _imported(_named(module, _line(text), name))
    assert isinstance(made(data), Batches)
    assert len(generators.defined) == 1
    with data.held() as held:
        assert held == "held"
    assert list(data.outer(4)) == [4, 5]
    generators.remove()


def test_another_line_or_another_name_is_another_function(module: Path) -> None:
    line = _line("def batches(first")
    wrong = (_named(module, line + 1, "batches"), _named(module, line, "batch"))
    data, generators = _imported(*wrong)
    assert isinstance(data.batches(1), Iterator)
    assert not isinstance(data.batches(1), Batches)
    assert not generators.defined
    generators.remove()


def test_no_compiled_file_is_left_of_it(module: Path) -> None:
    _, generators = _imported(_named(module, _line("def batches(first"), "batches"))
    generators.remove()
    assert not list(module.parent.glob("__pycache__/suspended_data*"))
    usual = importlib.reload(sys.modules["suspended_data"])
    assert not isinstance(usual.batches(1), Batches)


def test_where_none_is_wanted_nothing_is_changed() -> None:
    usual = SourceFileLoader.get_code
    generators = Generators(())
    generators.install()
    assert SourceFileLoader.get_code is usual
    assert here() is None
    generators.remove()
