"""A rank's side: enter the folder, and let nothing be written elsewhere without a way back."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from nfold.core.source_location import SANDBOX_ROOTS, display_path
from nfold.sandbox.audit_events import AUDIT_HOOK, wrap_unaudited_writers
from nfold.sandbox.file_lock import lock_file
from nfold.sandbox.mirror import CopyOnWriteMirror
from nfold.sandbox.undo_journal import UndoJournal

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
        if self._mirror.contains(path):
            (self.on_write if file else self.on_replace)(path)
        elif self._is_restored(path):
            self._journal.back_up(path)
            if file:
                self._log_write(path, in_mirror=False)

    def _is_restored(self, path: str) -> bool:
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
    return os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))


def _longest_prefix(folders: Iterable[str], path: str) -> int:
    inside = (f for f in folders if path == f or path.startswith(f.rstrip(os.sep) + os.sep))
    return max((len(folder) for folder in inside), default=0)


MAX_LISTED_FILES = 3


@dataclass(frozen=True, kw_only=True)
class WriteReport:
    """What a script would have written: paths with sizes in bytes, the first written first.

    ``undone`` counts the files elsewhere that it really wrote and that are as before again;
    ``failed`` are sentences about those that are not.
    """

    files: tuple[tuple[str, int], ...] = ()
    restored_count: int = 0
    restore_errors: tuple[str, ...] = ()

    def __str__(self) -> str:
        if not self.files:
            return "would have written nothing"
        count, size = len(self.files), sum(size for _, size in self.files)
        names = [display_path(path) for path, _ in self.files[:MAX_LISTED_FILES]]
        more = ", ..." if count > MAX_LISTED_FILES else ""
        put_back = f"; {self.restored_count} elsewhere, undone" if self.restored_count else ""
        return (
            f"would have written {count} file{'s' * (count != 1)} ({_format_size(size)}): "
            f"{', '.join(names)}{more}{put_back}"
        )


def clean_up(folder: Path) -> WriteReport:
    """Undo and clear away what a run left in its scratch folder, however it ended.

    What could not be put back stays in the folder, with the old content.
    """
    mine = folder.with_name(f"{folder.name}-{os.getpid()}")
    try:
        folder.rename(mine)
    except FileNotFoundError:
        return WriteReport()
    with contextlib.ExitStack() as stack:
        # A loader's worker that outlives its rank for a moment still has the lock.
        with contextlib.suppress(OSError):
            stack.enter_context(lock_file(mine / LOCK, fcntl.LOCK_EX | fcntl.LOCK_NB))
        return _undo_and_remove(Path(os.path.realpath(mine)))


def clean_up_stale(measurements: Path) -> list[WriteReport]:
    """Settle the scratch folders whose runs and parents are gone; what was in them.

    ``measurements`` holds the folders of all runs. One that a living process holds is left alone.
    """
    found = [folder for folder in measurements.glob("*/scratch*") if not _is_locked(folder)]
    return [clean_up(folder) for folder in sorted(found)]


def _undo_and_remove(folder: Path) -> WriteReport:
    noted = _logged_writes(folder)
    files = tuple(_written_sizes(folder, noted))
    failed = UndoJournal(str(folder / JOURNAL)).undo()
    shutil.rmtree(folder / ROOT, ignore_errors=True)
    if not failed:
        shutil.rmtree(folder, ignore_errors=True)
    undone = sum(not inside for _, inside in noted)
    return WriteReport(files=files, restored_count=undone, restore_errors=tuple(failed))


def _written_sizes(folder: Path, noted: Iterable[tuple[str, bool]]) -> Iterator[tuple[str, int]]:
    mirror = CopyOnWriteMirror(str(folder / ROOT))
    for path, inside in noted:
        place = mirror.to_mirror(path) if inside else path
        if os.path.isfile(place) and not (inside and os.path.islink(place)):
            yield path, os.path.getsize(place)


def _logged_writes(folder: Path) -> list[tuple[str, bool]]:
    file = folder / WRITE_LOG
    lines = file.read_text(encoding="ascii").split("\n")[:-1] if file.exists() else []
    return list(dict.fromkeys((path, inside) for path, inside in map(json.loads, lines)))


def _is_locked(folder: Path) -> bool:
    try:
        lock_file(folder / LOCK, fcntl.LOCK_EX | fcntl.LOCK_NB).close()
    except OSError:
        return True
    return False


def _format_size(size: int) -> str:
    for unit, bytes_ in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= bytes_:
            return f"{size / bytes_:.1f} {unit}"
    return f"{size} bytes"
