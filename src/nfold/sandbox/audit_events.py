"""Audit events before Python writes to a file, and hooks for functions that write in C."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import sys
import threading
import types
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from nfold.core.import_hooks import call_after_import

WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class WriteListener:
    """Receives every change before it is made. Paths are absolute, but not normalized."""

    def on_write(self, path: str, *, empties: bool = False) -> None:
        """A file is opened for writing, or changed; ``empties``: it is truncated at once."""

    def on_change_attributes(self, path: str) -> None:
        """Mode, owner or times of a file are changed."""

    def on_open_database(self, path: str) -> None:
        """An SQLite database is opened."""

    def on_enter_folder(self, path: str) -> None:
        """A folder becomes the working directory, or is removed as a whole."""

    def on_replace(self, path: str) -> None:
        """A name is created, removed or replaced."""

    def on_rename(self, source: str, target: str) -> None:
        """A file or a folder is renamed."""

    def on_execute(self, program: str) -> None:
        """This process is replaced by another program."""

    def on_start_process(self, environment: dict[Any, Any]) -> None:
        """A process is started with an environment of its own."""


class AuditHook:
    """The audit hook of this process. Hooks cannot be removed, so its listener can be None."""

    def __init__(self) -> None:
        self.listener: WriteListener | None = None
        self._installed = False
        self._busy = threading.local()

    def set_listener(self, listener: WriteListener | None) -> None:
        self.listener = listener
        if listener is not None and not self._installed:
            self._installed = True
            sys.addaudithook(self.handle_event)

    def handle_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Pass an event to the listener, unless the listener itself caused it."""
        act = EVENT_HANDLERS.get(event)
        if act is _on_open and not _is_write(arguments[2]):
            return
        if act is not None and self.listener is not None and not getattr(self._busy, "now", False):
            with self.mute():
                act(self.listener, *arguments)

    @contextlib.contextmanager
    def mute(self) -> Iterator[None]:
        """Ignore the events of this thread while the context is entered."""
        before = getattr(self._busy, "now", False)
        self._busy.now = True
        try:
            yield
        finally:
            self._busy.now = before


AUDIT_HOOK = AuditHook()


def _on_open(listener: WriteListener, path: Any, mode: Any, flags: Any) -> None:
    del mode
    _notify(listener.on_write, path, empties=bool(flags & os.O_TRUNC))


def _is_write(flags: Any) -> bool:
    return isinstance(flags, int) and bool(flags & WRITE_FLAGS)


def _on_rename(
    listener: WriteListener, source: Any, target: Any, source_fd: int, target_fd: int
) -> None:
    pair = _absolute(source, source_fd), _absolute(target, target_fd)
    if pair[0] is not None and pair[1] is not None:
        listener.on_rename(pair[0], pair[1])


def _on_create(listener: WriteListener, path: Any, mode: Any = None, dir_fd: int = -1) -> None:
    del mode
    _notify(listener.on_replace, path, dir_fd)


def _on_remove(listener: WriteListener, path: Any, dir_fd: int = -1) -> None:
    _notify(listener.on_replace, path, dir_fd)


def _on_remove_folder(listener: WriteListener, path: Any, dir_fd: Any = -1) -> None:
    _notify(listener.on_enter_folder, path, -1 if dir_fd is None else dir_fd)
    _notify(listener.on_replace, path, -1 if dir_fd is None else dir_fd)


def _on_link(
    listener: WriteListener, source: Any, target: Any, source_fd: int, target_fd: int
) -> None:
    _notify(listener.on_write, source, source_fd)  # it can be written to by its new name
    _notify(listener.on_replace, target, target_fd)


def _on_symlink(listener: WriteListener, source: Any, target: Any, dir_fd: int) -> None:
    del source
    _notify(listener.on_replace, target, dir_fd)


def _on_truncate(listener: WriteListener, path: Any, length: int) -> None:
    del length
    _notify(listener.on_write, path)


def _on_change(listener: WriteListener, path: Any, *values: Any) -> None:
    fds = [v for v in values[-1:] if isinstance(v, int)]
    if isinstance(path, int):
        path = f"/proc/self/fd/{path}"
    _notify(listener.on_change_attributes, path, *fds)


def _on_chdir(listener: WriteListener, path: Any) -> None:
    _notify(listener.on_enter_folder, path)


def _on_sqlite_connect(listener: WriteListener, path: Any) -> None:
    name = os.fsdecode(path)
    options: dict[str, list[str]] = {}
    if name.startswith("file:"):
        uri = urllib.parse.urlsplit(name)
        options = urllib.parse.parse_qs(uri.query)
        name = urllib.parse.unquote(uri.path)
    if name and name != ":memory:" and options.get("mode") not in (["ro"], ["memory"]):
        _notify(listener.on_open_database, name)


def _on_execute(listener: WriteListener, program: Any, arguments: Any, environment: Any) -> None:
    del arguments, environment
    listener.on_execute(os.fsdecode(program))


def _on_start_process(
    listener: WriteListener, program: Any, arguments: Any, folder: Any, environment: Any = None
) -> None:
    del program, arguments, folder
    if isinstance(environment, dict):
        listener.on_start_process(environment)


EVENT_HANDLERS: dict[str, Callable[..., None]] = {
    "open": _on_open,
    "os.chdir": _on_chdir,
    "os.chmod": _on_change,
    "os.chown": _on_change,
    "os.exec": _on_execute,
    "os.link": _on_link,
    "os.mkdir": _on_create,
    "os.remove": _on_remove,
    "os.rename": _on_rename,
    "os.rmdir": _on_remove_folder,
    "os.symlink": _on_symlink,
    "os.truncate": _on_truncate,
    "os.utime": _on_change,
    "shutil.rmtree": _on_remove_folder,
    "sqlite3.connect": _on_sqlite_connect,
    "subprocess.Popen": _on_start_process,
}


def _notify(callback: Callable[..., None], path: Any, dir_fd: int = -1, **more: Any) -> None:
    absolute = _absolute(path, dir_fd)
    if absolute is not None:
        callback(absolute, **more)


def _absolute(path: Any, dir_fd: int = -1) -> str | None:
    if isinstance(path, int) or path is None:
        return None
    try:
        base = os.getcwd() if dir_fd < 0 else os.readlink(f"/proc/self/fd/{dir_fd}")
        return os.path.join(base, os.fsdecode(path))
    except (OSError, TypeError):
        return None


@dataclass(frozen=True)
class PathArgument:
    """The positions of the arguments of a function that name the file and its mode."""

    position: int
    name: str
    mode_position: int | None = None


# Functions that open files in C, without an audit event.
UNAUDITED_WRITERS: dict[str, dict[str, PathArgument]] = {
    "cv2": {"imwrite": PathArgument(0, "filename")},
    "pyarrow.csv": {"write_csv": PathArgument(1, "output_file")},
    "pyarrow.feather": {"write_feather": PathArgument(1, "dest")},
    "pyarrow.parquet": {
        "write_table": PathArgument(1, "where"),
        "ParquetWriter": PathArgument(0, "where"),
    },
    "soundfile": {"write": PathArgument(0, "file")},
    "torch": {"save": PathArgument(1, "f")},
    "torch.export": {"save": PathArgument(1, "f")},
    "torchaudio": {"save": PathArgument(0, "uri")},
    "torchvision.io": {
        "write_jpeg": PathArgument(1, "filename"),
        "write_png": PathArgument(1, "filename"),
        "write_video": PathArgument(0, "filename"),
    },
    "torch.serialization": {"save": PathArgument(1, "f")},
    "torch.jit": {"save": PathArgument(1, "f")},
    "safetensors.torch": {
        "save_file": PathArgument(1, "filename"),
        "save_model": PathArgument(1, "filename"),
    },
    "safetensors.numpy": {"save_file": PathArgument(1, "filename")},
    "h5py": {"File": PathArgument(0, "name", mode_position=1)},
}


def wrap_unaudited_writers() -> None:
    """Wrap the functions of ``UNAUDITED_WRITERS``, if needed when their module is imported.

    And ``os.open``, whose audit event does not name the folder of a relative path.
    """
    call_after_import(dict.fromkeys(UNAUDITED_WRITERS, wrap_module))
    if not hasattr(os.open, "is_announced"):
        _wrap_os_open()


def _wrap_os_open() -> None:
    original = os.open

    @functools.wraps(original)
    def wrapper(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if dir_fd is None:
            return original(path, flags, mode)
        AUDIT_HOOK.handle_event("open", (_absolute(path, dir_fd), None, flags))
        with AUDIT_HOOK.mute():
            return original(path, flags, mode, dir_fd=dir_fd)

    wrapper.is_announced = True  # type: ignore[attr-defined]
    os.supports_dir_fd.add(wrapper)
    os.open = wrapper


def wrap_module(module: types.ModuleType) -> None:
    """Tell the listener of the files that this module's functions write."""
    for name, argument in UNAUDITED_WRITERS[module.__name__].items():
        original = getattr(module, name, None)
        if isinstance(original, type):
            # The class stays itself: others may inherit from it.
            own = dataclasses.replace(argument, position=argument.position + 1)
            mode = None if argument.mode_position is None else argument.mode_position + 1
            _wrap_writer(original, "__init__", dataclasses.replace(own, mode_position=mode))
        elif original is not None:
            _wrap_writer(module, name, argument)


def _wrap_writer(owner: Any, name: str, argument: PathArgument) -> None:
    original = getattr(owner, name)
    if hasattr(original, "is_announced"):
        return

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        path = _argument(args, kwargs, argument.position, argument.name)
        mode = (
            "w"
            if argument.mode_position is None
            else _argument(args, kwargs, argument.mode_position, "mode") or "r"
        )
        if isinstance(path, str | bytes | os.PathLike) and mode != "r":
            AUDIT_HOOK.handle_event(
                "open", (path, mode, os.O_WRONLY | (os.O_TRUNC if mode == "w" else 0))
            )
        return original(*args, **kwargs)

    wrapper.is_announced = True  # type: ignore[attr-defined]
    setattr(owner, name, wrapper)


def _argument(args: Sequence[Any], kwargs: dict[str, Any], position: int, name: str) -> Any:
    return args[position] if len(args) > position else kwargs.get(name)
