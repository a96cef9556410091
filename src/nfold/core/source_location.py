"""Where in the user's own code something happens, and how a path is shown to a person."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
import traceback
from pathlib import Path
from types import FrameType

NON_USER_FOLDERS = tuple(
    os.path.realpath(folder)
    for folder in (
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        os.path.dirname(os.path.dirname(__file__)),
    )
)
"""Folders whose code is not the user's: Python's, installed packages', nfold's."""
SANDBOX_ROOTS: dict[str, str] = {}
"""Folders in which the file system appears again, for a script that must not write into it, and the
folder in each that the script was started in."""
PACKAGE_FOLDERS = ("site-packages", "dist-packages")
"""Names of folders of installed packages, also of those that another environment lends."""
TRANSPARENT_PACKAGES = ("torch", "nfold")
"""Installed packages through which everything goes."""


def error_location(error: BaseException) -> str | None:
    """``train.py:42``: the innermost frame in the user's own code, None where there is none."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{display_filename(error.filename)}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if is_user_code(frame.filename)]
    return f"{display_filename(own[-1].filename)}:{own[-1].lineno}" if own else None


def current_user_line() -> str | None:
    """``train.py:42``: the innermost frame of this thread in the user's own code, or None."""
    return current_user_call()[0]


def user_stack() -> tuple[tuple[str, int], ...]:
    """Files and lines of the user's code that this thread is in, the innermost first."""
    frames = traceback.walk_stack(sys._getframe(1))
    return tuple((f.f_code.co_filename, n) for f, n in frames if is_user_code(f.f_code.co_filename))


def current_user_call() -> tuple[str | None, str | None]:
    """``place_here``, and the line of the package that the user's code has called there.

    ``transformers/trainer.py:1914``: the innermost one of that package. None where the user's code
    has called PyTorch itself.
    """
    frame, inside = find_user_frame(sys._getframe(1))
    return (None, None) if frame is None else (frame_line(frame), inside)


def find_user_frame(frame: FrameType) -> tuple[FrameType | None, str | None]:
    """The innermost one in the user's own code, and what it has called, as ``called_here`` says."""
    inside: tuple[str, str] | None = None
    for one, line in traceback.walk_stack(frame):
        filename = one.f_code.co_filename
        if is_user_code(filename):
            return one, inside[1] if inside else None
        of_package = path_in_package(filename)
        package = of_package.partition("/")[0]
        if of_package and (inside is None or inside[0] != package):
            inside = package, f"{of_package}:{line}"
    return None, None


def frame_line(frame: FrameType) -> str:
    """``train.py:42``."""
    return f"{display_filename(frame.f_code.co_filename)}:{frame.f_lineno}"


def display_path(path: str | Path) -> str:
    """Relative to the working directory where it is below it."""
    path, here = Path(path), Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


@functools.cache
def is_user_code(filename: str) -> bool:
    """Whether the code of a file is neither Python's, nor a package's, nor nfold's."""
    real = os.path.realpath(filename)
    generated = filename.startswith("<")
    in_package = any(part in PACKAGE_FOLDERS for part in real.split(os.sep))
    ours = any(real.startswith(folder + os.sep) for folder in NON_USER_FOLDERS)
    return not (generated or in_package or ours)


@functools.cache
def path_in_package(filename: str) -> str:
    """``transformers/trainer.py``; empty for what is not installed, or passed over."""
    parts = filename.replace(os.sep, "/").split("/")
    below = next(
        (at for at in range(len(parts) - 1, 0, -1) if parts[at] in PACKAGE_FOLDERS), len(parts)
    )
    found = parts[below + 1 :]
    return "" if not found or found[0] in TRANSPARENT_PACKAGES else "/".join(found)


def display_filename(filename: str) -> str:
    """Relative to the working directory where it is below it; never by its name in a mirror.

    That of a script in a mirror is the one that it was started in, wherever it has gone since.
    """
    mirrors = (entry for entry in SANDBOX_ROOTS.items() if filename.startswith(entry[0] + os.sep))
    root, began = next(mirrors, ("", os.getcwd()))
    relative = os.path.relpath(filename, began)
    return filename[len(root) :] if relative.startswith(os.pardir) else relative
