"""Finds lines of the user's own code on the stack, and formats paths for display.

User code is every file that belongs neither to Python, nor to an installed package, nor to nfold.
Packages are recognized by the real folders that they are installed in: a user's file below a
folder named ``torch`` is user code, PyTorch imported from a source checkout is not.
"""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
import traceback
from pathlib import Path
from types import FrameType

SANDBOX_ROOTS: dict[str, str] = {}  # mirror of the file system: working directory inside it
PACKAGE_FOLDERS = ("site-packages", "dist-packages")  # also those of another environment
TRANSPARENT_PACKAGES = ("torch", "nfold")  # never reported as the called package
NON_USER_FOLDERS = tuple(
    os.path.realpath(folder)
    for folder in (
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        os.path.dirname(os.path.dirname(__file__)),
    )
)


def error_location(error: BaseException) -> str | None:
    """Return the innermost line of user code in a traceback, ``train.py:42``, or None."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{display_filename(error.filename)}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if is_user_code(frame.filename)]
    return f"{display_filename(own[-1].filename)}:{own[-1].lineno}" if own else None


def current_user_line() -> str | None:
    """Return the innermost line of user code on this thread's stack, ``train.py:42``, or None."""
    return current_user_call()[0]


def user_stack() -> tuple[tuple[str, int], ...]:
    """Return files and lines of the user code on this thread's stack, innermost first."""
    frames = traceback.walk_stack(sys._getframe(1))
    return tuple((f.f_code.co_filename, n) for f, n in frames if is_user_code(f.f_code.co_filename))


def current_user_call() -> tuple[str | None, str | None]:
    """Return the innermost line of user code, and the line of the package that it called.

    The second is the innermost line of that package, ``transformers/trainer.py:1914``, or None if
    user code called PyTorch itself.
    """
    frame, package_line = find_user_frame(sys._getframe(1))
    return (None, None) if frame is None else (frame_line(frame), package_line)


def find_user_frame(frame: FrameType) -> tuple[FrameType | None, str | None]:
    """Return the innermost frame of user code, and the package line as ``current_user_call``."""
    called: tuple[str, str] | None = None
    for caller, line in traceback.walk_stack(frame):
        filename = caller.f_code.co_filename
        if is_user_code(filename):
            return caller, called[1] if called else None
        path = path_in_package(filename)
        package = path.partition("/")[0]
        if path and (called is None or called[0] != package):
            called = package, f"{path}:{line}"
    return None, None


def frame_line(frame: FrameType) -> str:
    return f"{display_filename(frame.f_code.co_filename)}:{frame.f_lineno}"


def display_path(path: str | Path) -> str:
    """Return a path relative to the working directory if it is below it."""
    path, here = Path(path), Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


@functools.cache
def is_user_code(filename: str) -> bool:
    """Return whether a file belongs neither to Python, nor to a package, nor to nfold."""
    if filename.startswith("<"):  # generated code
        return False
    real = os.path.realpath(filename)
    torch_file = getattr(sys.modules.get("torch"), "__file__", None)
    folders = [os.path.dirname(os.path.realpath(torch_file))] if torch_file else []
    return not is_in_package(real) and not any(
        real.startswith(folder + os.sep) for folder in (*NON_USER_FOLDERS, *folders)
    )


def is_in_package(filename: str) -> bool:
    """Return whether a file belongs to an installed package."""
    return any(part in PACKAGE_FOLDERS for part in filename.split(os.sep))


@functools.cache
def path_in_package(filename: str) -> str:
    """Return ``transformers/trainer.py``; empty outside packages and in transparent ones."""
    parts = filename.replace(os.sep, "/").split("/")
    below = next(
        (at for at in range(len(parts) - 1, 0, -1) if parts[at] in PACKAGE_FOLDERS), len(parts)
    )
    found = parts[below + 1 :]
    return "" if not found or found[0] in TRANSPARENT_PACKAGES else "/".join(found)


def display_filename(filename: str) -> str:
    """Return a path relative to the working directory if it is below it.

    A file in a sandbox is shown by its original path, relative to the directory that the script
    was started in, even if the script has changed its directory since.
    """
    mirrors = (entry for entry in SANDBOX_ROOTS.items() if filename.startswith(entry[0] + os.sep))
    root, start = next(mirrors, ("", os.getcwd()))
    relative = os.path.relpath(filename, start)
    return filename[len(root) :] if relative.startswith(os.pardir) else relative
