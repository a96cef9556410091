"""Folders of the cache: filled beside, then renamed, so that one that is there is whole."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from nfold.errors import MachineUnfit

CompletenessCheck = Callable[[Path, bool], bool]
"""Whether a folder is there and whole; checksums are tested too where the second says so."""


def write_folder(
    folder: Path, fill: Callable[[Path], None], is_complete: CompletenessCheck
) -> None:
    """Let ``fill`` write a folder's files; where another process was first, its folder stands.

    Raises MachineUnfit where the cache cannot be written.
    """
    aside = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    try:
        aside.mkdir(parents=True)
        fill(aside)
        _rename_into_place(aside, folder, is_complete)
    except OSError as error:
        raise MachineUnfit(
            f"the cache {folder} cannot be written: {error}; next: make room there, or "
            "NFOLD_CACHE=FOLDER"
        ) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _rename_into_place(temporary: Path, folder: Path, is_complete: CompletenessCheck) -> None:
    """Rename ``aside`` to ``folder``; a damaged one that is in the way is moved off first.

    Moved, not emptied in place: a process that has it mapped keeps its files.
    """
    if is_complete(folder, True):
        return
    old = temporary.with_name(f"{temporary.name}.old")
    with suppress(FileNotFoundError):
        os.rename(folder, old)
    try:
        os.rename(temporary, folder)
    except OSError:
        if not is_complete(folder, False):
            raise
    finally:
        shutil.rmtree(old, ignore_errors=True)
