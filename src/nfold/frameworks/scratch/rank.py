"""A rank's side: enter the folder, and let nothing be written elsewhere without a way back."""

from __future__ import annotations

import fcntl
import json
import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from nfold.frameworks.scratch.events import HOOK, wrap_silent
from nfold.frameworks.scratch.journal import Journal
from nfold.frameworks.scratch.locks import held
from nfold.frameworks.scratch.mirror import Mirror
from nfold.place import MIRRORS

ROOT, JOURNAL, TOUCHED, LOCK = "root", "journal", "touched", "lock"
STORE = "nfold.db"
CACHES = (
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
AT_HOME = (".cache", ".triton", ".nv", ".torch", ".keras", ".config/matplotlib")
SYSTEM = ("/dev", "/proc", "/sys", "/run")


class Scratch:
    """The folder of one script's run, entered by this process; ``close`` is for tests."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._from = os.getcwd()
        self._mirror = Mirror(str(folder / ROOT), hidden=str(_results(folder)))
        self._journal = Journal(str(folder / JOURNAL))
        self._known: set[str] = set()
        self._guarded = [self._from]
        self._alone = [*_left_alone(), str(folder.parent)]
        self._lock = held(folder / LOCK, fcntl.LOCK_SH)
        self._mirror.make(self._from)
        self._go(self._mirror.place(self._from))
        MIRRORS[self._mirror.root] = os.getcwd()

    def script(self, path: str) -> str:
        """The path to run a script by, relative or absolute as it was: a file of its own here."""
        real = os.path.join(self._from, path)
        home = os.path.realpath(os.path.dirname(real))
        self._guarded.append(home)
        place = self._mirror.place(os.path.join(home, os.path.basename(real)))
        with HOOK.silent():
            self._mirror.make(home)
            self._mirror.writable(place, follow=True)
        return place if os.path.isabs(path) else path

    def writes(self, path: str, *, empties: bool = False) -> None:
        """Make the file real that is about to be written, or keep what it holds."""
        if self._mirror.holds(path):
            place = self._mirror.writable(path, follow=True, empty=empties)
            self._note(self._mirror.meant(place), inside=True)
        else:
            self._outside(os.path.realpath(path), file=True)

    def enters(self, path: str) -> None:
        """Make the folder real."""
        if self._mirror.holds(path):
            self._mirror.writable(path, follow=True)

    def replaces(self, path: str) -> None:
        """Make the folder real that holds the name, or keep what it stands for."""
        if self._mirror.holds(path):
            self._mirror.writable(path, follow=False)
        else:
            self._outside(_itself(path), file=False)

    def renames(self, source: str, target: str) -> None:
        """The same for both names."""
        if self._mirror.holds(target):
            place = self._mirror.writable(target, follow=False)
            self._note(self._mirror.meant(place), inside=True)
        else:
            self._outside(_itself(target), file=True)
        if self._mirror.holds(source):
            self._mirror.writable(source, follow=False)
        elif os.path.isdir(source) and self._restores(_itself(source)):
            self._journal.moved(_itself(source), _itself(target))
        else:
            self._outside(_itself(source), file=False)

    def close(self) -> None:
        """Listen no more, and go back."""
        HOOK.listen(None)
        self._go(self._from)
        self._lock.close()
        MIRRORS.clear()

    def _go(self, folder: str) -> None:
        os.chdir(folder)
        if "PWD" in os.environ:
            os.environ["PWD"] = folder

    def _outside(self, path: str, *, file: bool) -> None:
        """Keep what is at a path that is to be put back; ``file``: count it as written."""
        if self._mirror.holds(path):
            (self.writes if file else self.replaces)(path)
        elif self._restores(path):
            self._journal.keep(path)
            if file:
                self._note(path, inside=False)

    def _restores(self, path: str) -> bool:
        """Whether what is changed there is undone: the longest folder of both kinds decides."""
        return _longest(self._alone, path) < max(1, _longest(self._guarded, path))

    def _note(self, path: str, *, inside: bool) -> None:
        if path in self._known:
            return
        self._known.add(path)
        with open(self.folder / TOUCHED, "a", encoding="ascii") as file:
            file.write(json.dumps([path, inside]) + "\n")


def entered(folder: Path) -> Scratch:
    """Enter the scratch folder of a run: from now on this process writes only there.

    ``folder`` is made; ranks that should see each other's files share one. The working directory
    is then the same place in the mirror. Byte code of imported modules is not kept.
    """
    folder = Path(os.path.realpath(folder))
    folder.mkdir(parents=True, exist_ok=True)
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    scratch = Scratch(folder)
    wrap_silent()
    HOOK.listen(scratch)
    return scratch


def _results(folder: Path) -> Path:
    """The results folder that a scratch folder is in: no script is to find it in its way."""
    return next((p for p in folder.parents if (p / STORE).exists()), folder)


def _left_alone() -> list[str]:
    home = os.path.expanduser("~")
    named = (os.environ.get(name, "") for name in CACHES)
    found = [*SYSTEM, tempfile.gettempdir(), *(os.path.join(home, name) for name in AT_HOME)]
    return [os.path.realpath(path) for path in [*found, *filter(None, named)]]


def _itself(path: str) -> str:
    """The path without links on the way to it; a link at its end stays."""
    return os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))


def _longest(folders: Iterable[str], path: str) -> int:
    """The length of the longest of these folders that a path is in, 0 where none is."""
    inside = (f for f in folders if path == f or path.startswith(f.rstrip(os.sep) + os.sep))
    return max((len(folder) for folder in inside), default=0)
