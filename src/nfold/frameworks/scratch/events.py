"""What Python says before it writes: audit events, and functions that write in C without one."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from nfold.frameworks.imports import after_import

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Listener(Protocol):
    """Hears of every change before it is made. Paths are absolute, but not in normal form."""

    def writes(self, path: str, *, empties: bool = False) -> None:
        """A file is opened for writing, or changed; ``empties``: its content goes at once."""

    def enters(self, path: str) -> None:
        """A folder becomes the working directory, or is removed as a whole."""

    def replaces(self, path: str) -> None:
        """The name itself is made, removed or changed."""

    def renames(self, source: str, target: str) -> None:
        """A file or a folder gets another name."""


class Hook:
    """The one audit hook of a process: there is no way to remove one, so it can be silent."""

    def __init__(self) -> None:
        self.listener: Listener | None = None
        self._installed = False
        self._busy = threading.local()

    def listen(self, listener: Listener | None) -> None:
        """Tell ``listener`` from now on; None: nobody."""
        self.listener = listener
        if listener is not None and not self._installed:
            self._installed = True
            sys.addaudithook(self.heard)

    def heard(self, event: str, arguments: tuple[Any, ...]) -> None:
        """One audit event; what the listener itself does to files is not told to it."""
        act = ACTS.get(event)
        if act is _open and not _is_write(arguments[2]):
            return
        if act is not None and self.listener is not None and not getattr(self._busy, "now", False):
            with self.silent():
                act(self.listener, *arguments)

    @contextlib.contextmanager
    def silent(self) -> Iterator[None]:
        """Tell nobody what this thread does meanwhile."""
        self._busy.now = True
        try:
            yield
        finally:
            self._busy.now = False


HOOK = Hook()


def _open(listener: Listener, path: Any, mode: Any, flags: Any) -> None:
    del mode
    _tell(listener.writes, path, empties=bool(flags & os.O_TRUNC))


def _is_write(flags: Any) -> bool:
    return isinstance(flags, int) and bool(flags & WRITES)


def _rename(listener: Listener, source: Any, target: Any, source_fd: int, target_fd: int) -> None:
    pair = _absolute(source, source_fd), _absolute(target, target_fd)
    if pair[0] is not None and pair[1] is not None:
        listener.renames(pair[0], pair[1])


def _made(listener: Listener, path: Any, mode: Any = None, dir_fd: int = -1) -> None:
    del mode
    _tell(listener.replaces, path, dir_fd)


def _removed(listener: Listener, path: Any, dir_fd: int = -1) -> None:
    _tell(listener.replaces, path, dir_fd)


def _removed_folder(listener: Listener, path: Any, dir_fd: Any = -1) -> None:
    _tell(listener.enters, path, -1 if dir_fd is None else dir_fd)
    _tell(listener.replaces, path, -1 if dir_fd is None else dir_fd)


def _linked(listener: Listener, source: Any, target: Any, *fds: int) -> None:
    del source
    _tell(listener.replaces, target, fds[-1] if fds else -1)


def _changed(listener: Listener, path: Any, *rest: Any) -> None:
    del rest
    _tell(listener.writes, path)


def _entered(listener: Listener, path: Any) -> None:
    _tell(listener.enters, path)


def _database(listener: Listener, path: Any, *rest: Any) -> None:
    del rest
    if isinstance(path, str) and (path.startswith((":memory:", "file:")) or not path):
        return
    _tell(listener.writes, path)


ACTS: dict[str, Callable[..., None]] = {
    "open": _open,
    "os.chdir": _entered,
    "os.chmod": _changed,
    "os.chown": _changed,
    "os.link": _linked,
    "os.mkdir": _made,
    "os.remove": _removed,
    "os.rename": _rename,
    "os.rmdir": _removed_folder,
    "os.symlink": _linked,
    "os.truncate": _changed,
    "os.utime": _changed,
    "shutil.rmtree": _removed_folder,
    "sqlite3.connect": _database,
}


def _tell(said: Callable[..., None], path: Any, dir_fd: int = -1, **more: Any) -> None:
    absolute = _absolute(path, dir_fd)
    if absolute is not None:
        said(absolute, **more)


def _absolute(path: Any, dir_fd: int = -1) -> str | None:
    """Of an open file's number nothing is known, and nothing needs to be: it was opened before."""
    if isinstance(path, int) or path is None:
        return None
    try:
        base = os.getcwd() if dir_fd < 0 else os.readlink(f"/proc/self/fd/{dir_fd}")
        return os.path.join(base, os.fsdecode(path))
    except (OSError, TypeError):
        return None


@dataclass(frozen=True)
class Argument:
    """Where a function's argument is that names the file, and the one that says the mode."""

    place: int
    name: str
    mode: int | None = None


SILENT: dict[str, dict[str, Argument]] = {
    "torch": {"save": Argument(1, "f")},
    "torch.serialization": {"save": Argument(1, "f")},
    "torch.jit": {"save": Argument(1, "f")},
    "safetensors.torch": {
        "save_file": Argument(1, "filename"),
        "save_model": Argument(1, "filename"),
    },
    "safetensors.numpy": {"save_file": Argument(1, "filename")},
    "h5py": {"File": Argument(0, "name", mode=1)},
}
"""Functions that open files in C, without a word of Python's."""


def wrap_silent() -> None:
    """Wrap the functions of ``SILENT``, now where their module is there, else on its import."""
    after_import(dict.fromkeys(SILENT, wrap))


def wrap(module: types.ModuleType) -> None:
    """Tell the listener of the files that this module's functions write."""
    for name, argument in SILENT[module.__name__].items():
        original = getattr(module, name, None)
        if isinstance(original, type):
            # The class stays itself: others may inherit from it.
            own = dataclasses.replace(argument, place=argument.place + 1)
            mode = None if argument.mode is None else argument.mode + 1
            _wrap(original, "__init__", dataclasses.replace(own, mode=mode))
        elif original is not None:
            _wrap(module, name, argument)


def _wrap(owner: Any, name: str, argument: Argument) -> None:
    original = getattr(owner, name)
    if hasattr(original, "writes_in_c"):
        return

    @functools.wraps(original)
    def told(*args: Any, **kwargs: Any) -> Any:
        path = _given(args, kwargs, argument.place, argument.name)
        mode = "w" if argument.mode is None else _given(args, kwargs, argument.mode, "mode") or "r"
        if isinstance(path, str | bytes | os.PathLike) and mode != "r":
            HOOK.heard("open", (path, mode, os.O_WRONLY | (os.O_TRUNC if mode == "w" else 0)))
        return original(*args, **kwargs)

    told.writes_in_c = True  # type: ignore[attr-defined]
    setattr(owner, name, told)


def _given(args: Sequence[Any], kwargs: dict[str, Any], place: int, name: str) -> Any:
    return args[place] if len(args) > place else kwargs.get(name)
