"""Importing nfold is light: neither torch nor rich nor numpy, and help comes at once."""

from __future__ import annotations

import subprocess
import sys

import pytest

import nfold

HEAVY = ("torch", "rich", "typer", "numpy", "scipy", "sklearn", "altair", "pyarrow")


def loaded_after(statement: str) -> set[str]:
    """The top-level modules of a fresh interpreter after a statement; its output is dropped."""
    script = f"""
import contextlib, io, sys
with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
    {statement}
print(*sorted(name.partition('.')[0] for name in sys.modules))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


NEED_TORCH = ("Run", "linear_scaling_rule")


@pytest.mark.parametrize("name", ["", *(n for n in nfold.__all__ if n not in NEED_TORCH)])
def test_importing_nfold_and_its_names_is_light(name: str) -> None:
    assert not loaded_after(f"import nfold; nfold.{name or '__version__'}") & set(HEAVY)


@pytest.mark.parametrize("arguments", [["--help"], ["bench", "--help"], ["report", "--help"]])
def test_help_imports_no_torch_and_no_numpy(arguments: list[str]) -> None:
    call = f"import sys; sys.argv = {['nfold', *arguments]}; from nfold.cli import main; main()"
    assert not loaded_after(call) & (set(HEAVY) - {"rich", "typer"})


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'Rnu'"):
        nfold.Rnu  # noqa: B018  # the access is what is tested


def test_every_public_name_is_there() -> None:
    for name in nfold.__all__:
        assert getattr(nfold, name) is not None
