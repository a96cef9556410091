"""Where in the user's own code something happens, and in which package."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from nfold.core.source_location import current_user_call, current_user_line, is_user_code

Calling = Callable[[str], Callable[..., Any]]


@pytest.fixture
def calling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Calling]:
    """Makes an installed package whose function calls what it is given, from its second line."""
    installed = tmp_path / "lib" / "site-packages"
    monkeypatch.syspath_prepend(str(installed))
    names = []

    def call(name: str) -> Callable[..., Any]:
        package = installed / name
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("")
        (package / "calls.py").write_text("def call(what, *more):\n    return what(*more)\n")
        names.append(name)
        found: Callable[..., Any] = importlib.import_module(f"{name}.calls").call
        return found

    yield call
    for name in [name for name in sys.modules if name.partition(".")[0] in names]:
        del sys.modules[name]


def test_the_called_package_is_reported(calling: Calling) -> None:
    outer, inner = calling("made_up_outer"), calling("made_up_inner")
    where, inside = outer(inner, current_user_call)
    assert where is not None
    assert where.startswith("tests/unit/core/test_source_location.py:")
    assert inside == "made_up_outer/calls.py:2"
    assert outer(outer, current_user_call)[1] == "made_up_outer/calls.py:2"
    assert current_user_call()[1] is None
    assert str(outer(current_user_line)).startswith("tests/unit/core/test_source_location.py:")


def test_a_package_s_own_lines_are_found_from_the_inside(calling: Calling, tmp_path: Path) -> None:
    """The innermost of them, whatever it calls itself."""
    outer, inner = calling("made_up_outer"), calling("made_up_inner")
    deep = tmp_path / "lib" / "site-packages" / "made_up_outer" / "deep.py"
    deep.write_text("\n\n\ndef deep(what, *more):\n    return what(*more)\n")
    deeper = importlib.import_module("made_up_outer.deep").deep
    assert outer(deeper, inner, current_user_call)[1] == "made_up_outer/deep.py:5"


@pytest.mark.parametrize("name", ["torch", "nfold"])
def test_transparent_packages_are_skipped(tmp_path: Path, name: str) -> None:
    filename = str(tmp_path / "site-packages" / name / "calls.py")
    made: dict[str, Any] = {}
    exec(compile("def call(what):\n    return what()\n", filename, "exec"), made)
    where, inside = made["call"](current_user_call)
    assert (where is not None, inside) == (True, None)


def test_pytorch_is_known_by_its_own_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a source checkout, too; a user's folder may have the same name."""
    checkout = tmp_path / "src" / "torch"
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    monkeypatch.setattr(
        sys.modules["torch"], "__file__", str(checkout / "__init__.py"), raising=False
    )
    assert not is_user_code(str(checkout / "optim" / "sgd.py"))
    assert is_user_code(str(tmp_path / "projects" / "torch" / "train.py"))
