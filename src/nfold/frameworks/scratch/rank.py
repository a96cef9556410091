"""A rank's side: enter the folder, and let nothing be written elsewhere without a way back."""

from __future__ import annotations

import fcntl
import json
import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from nfold.frameworks.scratch.events import AUDIT_HOOK, wrap_unaudited_writers
from nfold.frameworks.scratch.journal import UndoJournal
from nfold.frameworks.scratch.locks import lock_file
from nfold.frameworks.scratch.mirror import CopyOnWriteMirror
from nfold.place import SANDBOX_ROOTS

ROOT, JOURNAL, WRITE_LOG, LOCK = "root", "journal", "touched", "lock"
STORE_NAME = "nfold.db"
CACHE_VARIABLES = (
    "CUDA_CACHE_PATH",
    "HF_DATASETS_CACHE",
    "HF_HOME",
    "MPLCONFIGDIR",
    "NFOLD_CACHE",
    "NFOLD_DATA",
    "NUMBA_CACHE_DIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "TORCH_HOME",
    "TRANSFORMERS_CACHE",
    "TRITON_CACHE_DIR",
    "TRITON_HOME",
    "XDG_CACHE_HOME",
    "XDG_RUNTIME_DIR",
)
"""Environment variables that name folders which outlive every run."""
HOME_CACHES = (".cache", ".triton", ".nv", ".torch", ".keras", ".config/matplotlib")
SYSTEM_ROOTS = ("/dev", "/proc", "/sys", "/run")


class Sandbox:
    """The folder of one script's run, entered by this process; ``close`` is for tests."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._original_folder = os.getcwd()
        self._mirror = CopyOnWriteMirror(str(folder / ROOT), hidden=str(_results_folder(folder)))
        self._journal = UndoJournal(str(folder / JOURNAL))
        self._logged_paths: set[str] = set()
        self._restored_roots = [self._original_folder]
        self._excluded_roots = [*_excluded_paths(), str(folder.parent)]
        self._lock = lock_file(folder / LOCK, fcntl.LOCK_SH)
        self._mirror.create(self._original_folder)
        self._change_folder(self._mirror.to_mirror(self._original_folder))
        SANDBOX_ROOTS[self._mirror.root] = os.getcwd()

    def prepare_script(self, path: str) -> str:
        """The path to run a script by, relative or absolute as it was: a file of its own here."""
        real = os.path.join(self._original_folder, path)
        home = os.path.realpath(os.path.dirname(real))
        self._restored_roots.append(home)
        place = self._mirror.to_mirror(os.path.join(home, os.path.basename(real)))
        with AUDIT_HOOK.mute():
            self._mirror.create(home)
            self._mirror.make_writable(place, follow=True)
        return place if os.path.isabs(path) else path

    def on_write(self, path: str, *, empties: bool = False) -> None:
        """Make the file real that is about to be written, or keep what it holds."""
        if self._mirror.contains(path):
            place = self._mirror.make_writable(path, follow=True, empty=empties)
            self._log_write(self._mirror.to_real(place), in_mirror=True)
        else:
            self._back_up_outside(os.path.realpath(path), file=True)

    def on_enter_folder(self, path: str) -> None:
        """Make the folder real."""
        if self._mirror.contains(path):
            self._mirror.make_writable(path, follow=True)

    def on_replace(self, path: str) -> None:
        """Make the folder real that holds the name, or keep what it stands for."""
        if self._mirror.contains(path):
            self._mirror.make_writable(path, follow=False)
        else:
            self._back_up_outside(_resolve_parent(path), file=False)

    def on_rename(self, source: str, target: str) -> None:
        """The same for both names."""
        if self._mirror.contains(target):
            place = self._mirror.make_writable(target, follow=False)
            self._log_write(self._mirror.to_real(place), in_mirror=True)
        else:
            self._back_up_outside(_resolve_parent(target), file=True)
        if self._mirror.contains(source):
            self._mirror.make_writable(source, follow=False)
        elif os.path.isdir(source) and self._is_restored(_resolve_parent(source)):
            self._journal.record_rename(_resolve_parent(source), _resolve_parent(target))
        else:
            self._back_up_outside(_resolve_parent(source), file=False)

    def close(self) -> None:
        """Listen no more, and go back."""
        AUDIT_HOOK.set_listener(None)
        self._change_folder(self._original_folder)
        self._lock.close()
        SANDBOX_ROOTS.clear()

    def _change_folder(self, folder: str) -> None:
        os.chdir(folder)
        if "PWD" in os.environ:
            os.environ["PWD"] = folder

    def _back_up_outside(self, path: str, *, file: bool) -> None:
        """Keep what is at a path that is to be put back; ``file``: count it as written."""
        if self._mirror.contains(path):
            (self.on_write if file else self.on_replace)(path)
        elif self._is_restored(path):
            self._journal.back_up(path)
            if file:
                self._log_write(path, in_mirror=False)

    def _is_restored(self, path: str) -> bool:
        """Whether what is changed there is undone: the longest folder of both kinds decides."""
        return _longest_prefix(self._excluded_roots, path) < max(
            1, _longest_prefix(self._restored_roots, path)
        )

    def _log_write(self, path: str, *, in_mirror: bool) -> None:
        if path in self._logged_paths:
            return
        self._logged_paths.add(path)
        with open(self.folder / WRITE_LOG, "a", encoding="ascii") as file:
            file.write(json.dumps([path, in_mirror]) + "\n")


def enter_sandbox(folder: Path) -> Sandbox:
    """Enter the scratch folder of a run: from now on this process writes only there.

    ``folder`` is made; ranks that should see each other's files share one. The working directory
    is then the same place in the mirror. Byte code of imported modules is not kept.
    """
    folder = Path(os.path.realpath(folder))
    folder.mkdir(parents=True, exist_ok=True)
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    scratch = Sandbox(folder)
    wrap_unaudited_writers()
    AUDIT_HOOK.set_listener(scratch)
    return scratch


def _results_folder(folder: Path) -> Path:
    """The results folder that a scratch folder is in: no script is to find it in its way."""
    return next((p for p in folder.parents if (p / STORE_NAME).exists()), folder)


def _excluded_paths() -> list[str]:
    home = os.path.expanduser("~")
    named = (os.environ.get(name, "") for name in CACHE_VARIABLES)
    found = [
        *SYSTEM_ROOTS,
        tempfile.gettempdir(),
        *(os.path.join(home, name) for name in HOME_CACHES),
    ]
    return [os.path.realpath(path) for path in [*found, *filter(None, named)]]


def _resolve_parent(path: str) -> str:
    """The path without links on the way to it; a link at its end stays."""
    return os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))


def _longest_prefix(folders: Iterable[str], path: str) -> int:
    """The length of the longest of these folders that a path is in, 0 where none is."""
    inside = (f for f in folders if path == f or path.startswith(f.rstrip(os.sep) + os.sep))
    return max((len(folder) for folder in inside), default=0)
