"""Enter the sandbox of a run, and clean it up: no change outside remains."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import json
import os
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from nfold.core.errors import MachineUnfit
from nfold.core.process_identity import SESSION_VARIABLE
from nfold.core.source_location import SANDBOX_ROOTS, display_path
from nfold.sandbox.audit_events import AUDIT_HOOK, WriteListener, wrap_unaudited_writers
from nfold.sandbox.change_watcher import append_line, read_lines
from nfold.sandbox.file_claims import (
    ENTRIES,
    PRIVATE_VARIABLE,
    FileClaims,
    journal_folder,
    private_folder,
    results_folder,
)
from nfold.sandbox.file_lock import lock_file
from nfold.sandbox.mirror import MAX_COPIED_BYTES, CopyOnWriteMirror, large_file_error
from nfold.sandbox.overlay import (
    JOURNAL_ONLY,
    MODE_VARIABLE,
    UPPER,
    enter_overlay,
    remove_uppers,
    temporary_caches,
    unavailable_reason,
    written_files,
)
from nfold.sandbox.undo_journal import UndoJournal, journaled_runs

ROOT, WRITE_LOG, LOCK, REFUSAL = "root", "touched", "lock", "refused"
CLEANUP_LOCK = "cleanup"
OLD_JOURNAL = "journal"  # of earlier versions, in the results folder
SANDBOX_VARIABLE = "NFOLD_SANDBOX_FOLDER"
STARTUP_FOLDER = os.path.join(os.path.dirname(__file__), "startup")
DATABASE_SUFFIXES = ("", "-journal", "-wal", "-shm")  # the files of an SQLite database
CACHE_VARIABLES = (  # folders that outlive every run
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
HOME_CACHES = (".cache", ".triton", ".nv", ".torch", ".keras", ".config/matplotlib")
SYSTEM_ROOTS = ("/dev", "/proc", "/sys", "/run")
VIEW_LOCKS: list[IO[bytes]] = []  # held until this process ends


class Sandbox(WriteListener):
    """The sandbox of one script's run, entered by this process; ``close`` is for tests.

    Ranks with another ``name`` do not see each other's files, but share the journal: files outside
    are restored to what they held before the first of them wrote. ``original_folder`` is given in
    a process that a rank started; its working directory is in the mirror already.
    """

    def __init__(
        self,
        folder: Path,
        name: str = "",
        original_folder: str = "",
        restored_roots: Iterable[str] = (),
        temporary_root: str = "",
    ) -> None:
        self.folder = folder
        self._name = name
        self._original_folder = original_folder or os.getcwd()
        root = str(folder / f"{ROOT}{name}")
        self._mirror = CopyOnWriteMirror(root, hidden=str(results_folder(folder)))
        self._journal = UndoJournal(str(folder))
        self._write_log = folder / f"{WRITE_LOG}{name}"
        self._logged_paths: set[str] = set()
        self._restored_roots = [*restored_roots] or [self._original_folder]
        self._excluded_roots = [*_excluded_paths(), str(folder.parent)]
        self._temporary_root = temporary_root or os.path.realpath(tempfile.gettempdir())
        self._temporary_paths: set[str] = set()  # created by this process
        self._rank_pid = 0 if original_folder else os.getpid()
        self._lock = lock_file(folder / LOCK, fcntl.LOCK_SH)
        working_folder = self._mirror.to_mirror(self._original_folder)
        if not original_folder:
            self._journal.create()
            self._mirror.create(self._original_folder)
            self._change_folder(working_folder)
            self._export()
        SANDBOX_ROOTS[self._mirror.root] = working_folder

    def prepare_script(self, path: str) -> str:
        """Copy the script into the mirror; returns its path, relative or absolute as given."""
        real = os.path.join(self._original_folder, path)
        home = os.path.realpath(os.path.dirname(real))
        self._restored_roots.append(home)
        self._export()
        place = self._mirror.to_mirror(os.path.join(home, os.path.basename(real)))
        with AUDIT_HOOK.mute():
            self._mirror.create(home)
            self._mirror.make_writable(place, follow=True)
        return place if os.path.isabs(path) else path

    def on_write(self, path: str, *, empties: bool = False) -> None:
        if self._mirror.contains(path):
            place = self._mirror.make_writable(path, follow=True, empty=empties)
            self._log_write(self._mirror.to_real(place), in_mirror=True)
        else:
            self._back_up_outside(os.path.realpath(path), opens=True, destroys=empties)

    def on_change_attributes(self, path: str) -> None:
        if self._mirror.contains(path):
            self.on_write(path)
        else:
            self._back_up_outside(os.path.realpath(path), content=False)

    def on_open_database(self, path: str) -> None:
        real = path if self._mirror.contains(path) else os.path.realpath(path)
        for suffix in DATABASE_SUFFIXES:
            if self._mirror.contains(real):
                self.on_write(real + suffix)
            else:
                self._back_up_outside(real + suffix, opens=not suffix, unit=real)

    def on_enter_folder(self, path: str) -> None:
        if self._mirror.contains(path):
            self._mirror.make_writable(path, follow=True)

    def on_replace(self, path: str) -> None:
        if self._mirror.contains(path):
            self._mirror.make_writable(path, follow=False)
        else:
            self._back_up_outside(_resolve_parent(path), destroys=True)

    def on_rename(self, source: str, target: str) -> None:
        if self._mirror.contains(target):
            place = self._mirror.make_writable(target, follow=False)
            self._log_write(self._mirror.to_real(place), in_mirror=True)
        else:
            self._back_up_outside(_resolve_parent(target), opens=True, destroys=True)
        if self._mirror.contains(source):
            self._mirror.make_writable(source, follow=False)
        elif os.path.isdir(source) and self._is_restored(_resolve_parent(source)):
            with _noting_refusal(self.folder):
                self._journal.record_rename(_resolve_parent(source), _resolve_parent(target))
        else:
            self._back_up_outside(_resolve_parent(source), destroys=True)

    def on_execute(self, program: str) -> None:
        if os.getpid() == self._rank_pid:
            _refuse_execution(self.folder, program)

    def on_start_process(self, environment: dict[Any, Any]) -> None:
        if SANDBOX_VARIABLE not in environment:
            for variable in {SANDBOX_VARIABLE, PRIVATE_VARIABLE, SESSION_VARIABLE} & {*os.environ}:
                environment[variable] = os.environ[variable]
            paths = [STARTUP_FOLDER, environment.get("PYTHONPATH", "")]
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))

    def _export(self) -> None:
        # Every Python process below this one enters the sandbox when it starts.
        where = self._name, self._original_folder, self._restored_roots, self._temporary_root
        os.environ[SANDBOX_VARIABLE] = json.dumps([str(self.folder), *where])
        os.environ[PRIVATE_VARIABLE] = os.path.dirname(private_folder("undo"))
        paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        if STARTUP_FOLDER not in paths:
            os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [STARTUP_FOLDER, *paths]))

    def close(self) -> None:
        """Leave the sandbox."""
        AUDIT_HOOK.set_listener(None)
        os.environ.pop(SANDBOX_VARIABLE, None)
        os.environ.pop(PRIVATE_VARIABLE, None)
        self._journal.close()
        self._change_folder(self._original_folder)
        self._lock.close()
        SANDBOX_ROOTS.clear()

    def _change_folder(self, folder: str) -> None:
        os.chdir(folder)
        if "PWD" in os.environ:
            os.environ["PWD"] = folder

    def _back_up_outside(self, path: str, *, opens: bool = False, **change: Any) -> None:
        if self._mirror.contains(path):
            (self.on_replace if change.get("destroys") and not opens else self.on_write)(path)
        elif self._is_restored(path):
            with _noting_refusal(self.folder):
                self._journal.back_up(path, opens=opens, **change)
            if opens:
                self._log_write(path, in_mirror=False)

    def _is_restored(self, path: str) -> bool:
        excluded = _longest_prefix(self._excluded_roots, path)
        restored = _longest_prefix(self._restored_roots, path)
        if _longest_prefix([self._temporary_root], path) <= max(excluded, restored):
            return excluded < max(1, restored)
        # Of temporary files only those are restored that the script found there.
        if self._temporary_paths.intersection([path, *map(str, Path(path).parents)]):
            return False
        if not os.path.lexists(path):
            self._temporary_paths.add(path)
        return path not in self._temporary_paths

    def _log_write(self, path: str, *, in_mirror: bool) -> None:
        if path in self._logged_paths:
            return
        self._logged_paths.add(path)
        append_line(self._write_log, [path, in_mirror])


def enter_sandbox(folder: Path, name: str = "") -> Sandbox:
    """Enter the sandbox of a run: from now on this process writes only there.

    Creates ``folder``. Ranks that shall see each other's files use one ``name``. The working
    directory becomes the same folder in the mirror. Byte code of imported modules is not written.
    """
    folder = Path(os.path.realpath(folder))
    folder.mkdir(parents=True, exist_ok=True)
    _stop_byte_code()
    return _listen(Sandbox(folder, name))


def join_sandbox() -> None:
    """Enter the sandbox of the process that started this one, if it is in one."""
    if SANDBOX_VARIABLE in os.environ:
        folder, *more = json.loads(os.environ[SANDBOX_VARIABLE])
        if os.path.isdir(folder):
            _listen(Sandbox(Path(folder), *more))


def _listen(sandbox: Sandbox) -> Sandbox:
    wrap_unaudited_writers()
    AUDIT_HOOK.set_listener(sandbox)
    return sandbox


def enter_view(folder: Path, name: str = "") -> None:
    """Enter a view of the file system in which this process changes nothing outside of ``folder``.

    Raises MachineUnfit if the machine does not allow it.
    """
    folder = Path(os.path.realpath(folder))
    folder.mkdir(parents=True, exist_ok=True)
    VIEW_LOCKS.append(lock_file(folder / LOCK, fcntl.LOCK_SH))
    kept = [*_cache_paths(), *temporary_caches(), str(folder.parent)]
    try:
        enter_overlay(folder, name, kept, [os.getcwd()])
    except OSError as error:
        raise MachineUnfit(
            f"no view of the file system ({error.strerror}); next: {MODE_VARIABLE}={JOURNAL_ONLY} "
            "in the environment, which undoes only what Python code writes"
        ) from error


@contextlib.contextmanager
def _noting_refusal(folder: Path) -> Iterator[None]:
    # The script may catch the error: the parent must learn of it in any case.
    try:
        yield
    except MachineUnfit as error:
        (folder / REFUSAL).write_text(str(error))
        raise


def _refuse_execution(folder: Path, program: str) -> None:
    with _noting_refusal(folder):
        raise MachineUnfit(
            f"the script replaces its process by {program} (os.exec), where nfold cannot measure "
            "it; next: do before nfold starts what the script restarts itself for, such as setting "
            "environment variables"
        )


class ViewGuard(WriteListener):
    """Refuses to change a large file in a view, which the kernel would copy first, and to exec."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._rank_pid = os.getpid()
        self._since = time.time()

    def on_execute(self, program: str) -> None:
        if os.getpid() == self._rank_pid:
            _refuse_execution(self._folder, program)

    def on_write(self, path: str, *, empties: bool = False) -> None:
        with contextlib.suppress(FileNotFoundError):
            status = os.stat(path)
            is_old = stat.S_ISREG(status.st_mode) and status.st_mtime < self._since
            if is_old and not empties and status.st_size > MAX_COPIED_BYTES:
                raise large_file_error(path, status.st_size)


def guard_view(folder: Path) -> None:
    """Refuse what a view cannot do well in this process, which has entered it."""
    _stop_byte_code()
    wrap_unaudited_writers()
    AUDIT_HOOK.set_listener(ViewGuard(folder))


def unprotected_reason(results: Path) -> str | None:
    """Return why writes of C libraries and of other programs cannot be held back here, or None.

    Then scripts of this process and its children use the mirror and the journal.
    """
    folder = results.absolute() / f"view-{os.getpid()}"
    reason = unavailable_reason(folder)
    shutil.rmtree(folder, ignore_errors=True)
    if reason is not None:
        os.environ[MODE_VARIABLE] = JOURNAL_ONLY
    return reason


def _stop_byte_code() -> None:
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"


def _cache_paths() -> list[str]:
    home = os.path.expanduser("~")
    named = (os.environ.get(name, "") for name in CACHE_VARIABLES)
    found = [*(os.path.join(home, name) for name in HOME_CACHES), *filter(None, named)]
    return [os.path.realpath(path) for path in found]


def _excluded_paths() -> list[str]:
    compiled = glob.glob(os.path.join(glob.escape(tempfile.gettempdir()), "torchinductor_*"))
    return [*SYSTEM_ROOTS, *map(os.path.realpath, compiled), *_cache_paths()]


def _resolve_parent(path: str) -> str:
    return os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))


def _longest_prefix(folders: Iterable[str], path: str) -> int:
    inside = (f for f in folders if path == f or path.startswith(f.rstrip(os.sep) + os.sep))
    return max((len(folder) for folder in inside), default=0)


MAX_LISTED_FILES = 3


@dataclass(frozen=True, kw_only=True)
class WriteReport:
    """The files that a script would have written, with sizes in bytes, the first written first.

    ``is_protected``: nothing that it or a program of it wrote is left outside of the sandbox.
    ``restored_count`` counts the files outside the sandbox that it changed and that are as before
    again; ``restore_errors`` has a sentence for each that is not. ``refusal`` says why the script
    was not allowed to change a file.
    """

    files: tuple[tuple[str, int], ...] = ()
    is_protected: bool = False
    restored_count: int = 0
    restore_errors: tuple[str, ...] = ()
    refusal: str | None = None

    def __str__(self) -> str:
        if not self.files:
            return "would have written nothing"
        count, size = len(self.files), sum(size for _, size in self.files)
        names = [display_path(path) for path, _ in self.files[:MAX_LISTED_FILES]]
        more = ", ..." if count > MAX_LISTED_FILES else ""
        restored = f"; {self.restored_count} elsewhere, undone" if self.restored_count else ""
        kept = "none was kept" if self.is_protected else "what its Python code wrote was undone"
        if self.restore_errors:
            kept = "not all was undone"
        return (
            f"would have written {count} file{'s' * (count != 1)} ({_format_size(size)}): "
            f"{', '.join(names)}{more}{restored}; {kept}"
        )


def clean_up(folder: Path) -> WriteReport:
    """Undo what a run changed outside its sandbox, when it has just ended, and delete the sandbox.

    If something could not be restored, the folder stays, and its journal with the old content.
    """
    return _clean_up(folder, witnessed=True)


def clean_up_stale(measurements: Path) -> list[WriteReport]:
    """Clean up the sandboxes of runs that were killed together with their parent.

    ``measurements`` holds the folders of all runs. A sandbox that a living process holds is left.
    Also undoes runs whose results folder was deleted. A file that was changed since its run was
    killed stays as it is.
    """
    FileClaims("").remove_expired()
    base = Path(os.path.realpath(measurements))
    found = {f for f in base.glob("*/scratch*") if f.is_dir() and Path(os.path.realpath(f)) == f}
    for run in journaled_runs():
        folder = Path(run.folder)
        if base in folder.parents if folder.exists() else not run.session_is_running:
            found.add(folder)
    stale = [folder for folder in sorted(found) if not _is_locked(folder)]
    return [_clean_up(folder, witnessed=False) for folder in stale]


def needs_restore(folder: Path) -> bool:
    """Return whether files outside the sandbox may hold what the script wrote."""
    return (journal_folder(os.path.realpath(folder)) / ENTRIES).exists()


def _clean_up(folder: Path, *, witnessed: bool) -> WriteReport:
    folder = Path(os.path.realpath(folder))
    journal = UndoJournal(str(folder))
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(FileNotFoundError):  # no run of this user was in this sandbox
            stack.enter_context(journal.lock_cleanup())
        with contextlib.suppress(FileNotFoundError):  # another process has deleted it
            stack.enter_context(lock_file(folder / CLEANUP_LOCK))
        return _undo_and_remove(folder, journal, witnessed)


def _undo_and_remove(folder: Path, journal: UndoJournal, witnessed: bool) -> WriteReport:
    roots = [root for root in sorted(folder.glob(f"{ROOT}*")) if root.is_dir()]
    logged: dict[tuple[str, bool], Path] = {}
    for root in roots:
        for path, in_mirror in read_lines(folder / root.name.replace(ROOT, WRITE_LOG, 1)):
            logged.setdefault((path, in_mirror), root)
    files = (*written_files(folder), *_written_sizes(logged))
    is_protected = any(folder.glob(f"{UPPER}*"))
    remove_uppers(folder)
    refusal = folder / REFUSAL
    reason = refusal.read_text() if refusal.exists() else None
    problems = journal.undo(witnessed=witnessed)
    errors = list(problems.values())
    for root in roots:
        shutil.rmtree(root, ignore_errors=True)
    is_settled = journal.remove_if_settled()
    if (folder / OLD_JOURNAL).exists():
        errors.append(
            f"{folder / OLD_JOURNAL} is from another version of nfold, or from someone else, and "
            f"was not used; next: restore files from it yourself, then delete {folder}"
        )
    elif is_settled:
        shutil.rmtree(folder, ignore_errors=True)
    return WriteReport(
        files=files,
        is_protected=is_protected,
        restored_count=sum(not inside and path not in problems for path, inside in logged),
        restore_errors=tuple(errors),
        refusal=reason,
    )


def _written_sizes(logged: Mapping[tuple[str, bool], Path]) -> Iterator[tuple[str, int]]:
    for (path, in_mirror), root in logged.items():
        place = CopyOnWriteMirror(str(root)).to_mirror(path) if in_mirror else path
        if os.path.isfile(place) and not (in_mirror and os.path.islink(place)):
            yield path, os.path.getsize(place)


def _is_locked(folder: Path) -> bool:
    try:
        lock_file(folder / LOCK, fcntl.LOCK_EX | fcntl.LOCK_NB).close()
    except OSError as error:
        return not isinstance(error, FileNotFoundError)
    return False


def _format_size(size: int) -> str:
    for unit, bytes_ in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= bytes_:
            return f"{size / bytes_:.1f} {unit}"
    return f"{size} bytes"
