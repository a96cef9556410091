"""Claims of files outside a sandbox: one run at a time may change a file, of all runs of a user.

A claim is a small file in the user's cache folder, named by a hash of the path. It needs no release:
it holds while the run has something to restore, its sandbox folder exists or the session, the nfold
process that started the run, is alive. A session keeps its claims between its runs, so that another
session cannot take a file from it in the middle of an experiment.

Runs of other hosts are seen only if their results folder is visible here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Iterator, Set
from dataclasses import dataclass
from pathlib import Path

from nfold.core.errors import MachineUnfit
from nfold.core.process_identity import SESSION_VARIABLE, ProcessIdentity
from nfold.core.serialization import deserialize, replace_file, serialize
from nfold.sandbox.file_lock import lock_file

PRIVATE_VARIABLE = "NFOLD_PRIVATE"  # in the processes of a run: the folder of claims and journals
STORE_NAME = "nfold.db"
ENTRIES = "entries"  # the journal of a run, in its journal folder


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One path that a run has changed, or is about to change; ``tree``: and all below it."""

    path: str
    folder: str
    pid: int
    start_ticks: int
    tree: bool = False

    @property
    def session(self) -> ProcessIdentity:
        return ProcessIdentity(self.pid, self.start_ticks)


class FileClaims:
    """The claims of the run whose sandbox is ``folder``."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        named = os.environ.get(SESSION_VARIABLE, "").split()[:2]
        self.session = (
            ProcessIdentity(*map(int, named)) if named else ProcessIdentity.of_this_process()
        )
        self._registry = private_folder("file-claims")

    def claim(self, path: str, *, tree: bool = False) -> None:
        """Claim a path; with ``tree`` all below it.

        Raises MachineUnfit if another run holds it, with the path and the process.
        """
        claim = Claim(
            path=path,
            folder=self.folder,
            pid=self.session.pid,
            start_ticks=self.session.start_ticks,
            tree=tree,
        )
        with self._lock():
            for held in self._overlapping(path, tree=tree):
                if self._blocks(held):
                    raise MachineUnfit(_refusal(held))
            self._write(claim)

    def holder(self, path: str) -> str | None:
        """Return why this run must not write to a path, or None."""
        with self._lock():
            held = next(filter(self._blocks, self._overlapping(path, tree=False)), None)
        return None if held is None else _refusal(held)

    def own_paths(self) -> list[str]:
        """Return the paths that this run has claimed."""
        return [claim.path for claim in self._all() if claim.folder == self.folder]

    def release(self, *, keep: Set[str]) -> None:
        """Release the paths that are restored, though the sandbox folder stays for the others."""
        with self._lock():
            for claim in self._all():
                if claim.folder == self.folder and claim.path not in keep:
                    self._write(dataclasses.replace(claim, folder=""))

    def remove_expired(self) -> None:
        """Delete the claims of sessions that have ended and left nothing to restore."""
        with self._lock():
            for claim in self._all():
                if not _holds_files(claim.folder) and not claim.session.is_running:
                    self._record(claim.path).unlink(missing_ok=True)

    def _blocks(self, claim: Claim) -> bool:
        if claim.folder == self.folder:
            return False
        if _holds_files(claim.folder):
            return True
        return claim.session != self.session and claim.session.is_running

    def _overlapping(self, path: str, *, tree: bool) -> Iterator[Claim]:
        at_path = _read(self._record(path))
        if at_path is not None:
            yield at_path
        for parent in Path(path).parents:
            above = _read(self._record(str(parent)))
            if above is not None and above.tree:
                yield above
        if tree:
            yield from (c for c in self._all() if c.path.startswith(path.rstrip(os.sep) + os.sep))

    def _all(self) -> list[Claim]:
        found = map(_read, sorted(self._registry.glob("*.json")))
        return [claim for claim in found if claim is not None]

    def _write(self, claim: Claim) -> None:
        with (
            replace_file(self._record(claim.path)) as temporary,
            temporary.open("w", encoding="ascii") as file,
        ):
            json.dump(serialize(claim), file)
            file.flush()
            os.fsync(file.fileno())

    def _record(self, path: str) -> Path:
        return self._registry / f"{hashlib.sha256(os.fsencode(path)).hexdigest()[:32]}.json"

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        with lock_file(self._registry / "lock"):
            yield


def private_folder(name: str) -> Path:
    """Return a folder of this user that no other user can write to; creates it.

    Raises MachineUnfit if the folder is a link or belongs to another user.
    """
    if PRIVATE_VARIABLE in os.environ:
        return _create_private(Path(os.environ[PRIVATE_VARIABLE]), name)
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    try:
        return _create_private(Path(cache, "nfold"), name)
    except OSError:
        return _create_private(Path(tempfile.gettempdir(), f"nfold-{os.getuid()}"), name)


def _create_private(parent: Path, name: str) -> Path:
    parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    for folder in (parent, parent / name):
        folder.mkdir(exist_ok=True, mode=0o700)
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise MachineUnfit(
                f"{folder} is a link or belongs to user {found.st_uid}; nfold keeps old content of "
                f"files there, in a folder of user {os.getuid()}; next: remove it, or set "
                "XDG_CACHE_HOME to another folder"
            )
    os.chmod(folder, 0o700)
    if not os.access(folder, os.W_OK):
        raise PermissionError(folder)
    return folder


def journal_folder(folder: str) -> Path:
    """Return the private folder with the journal and the backups of the sandbox ``folder``."""
    return private_folder("undo") / hashlib.sha256(os.fsencode(folder)).hexdigest()[:32]


def _holds_files(folder: str) -> bool:
    return os.path.isdir(folder) or (journal_folder(folder) / ENTRIES).exists()


def _read(record: Path) -> Claim | None:
    try:
        return deserialize(Claim, json.loads(record.read_text(encoding="ascii")))
    except (OSError, ValueError):
        return None


def _refusal(claim: Claim) -> str:
    if claim.session.is_running:
        process = f"process {claim.pid}: {claim.session.command}"
        return (
            f"{claim.path} is in use by another nfold run ({process}), which restores it at its "
            "end; next: start again when that process has ended, or let the script write to another file"
        )
    return (
        f"{claim.path} holds what a script wrote in an nfold run that was killed (process "
        f"{claim.pid}); its old content is in {journal_folder(claim.folder)}; next: {restore_command(claim.folder)}"
    )


def results_folder(folder: Path) -> Path:
    """Return the results folder that a sandbox lies in; without a store the sandbox itself."""
    return next((p for p in folder.parents if (p / STORE_NAME).exists()), folder)


def restore_command(folder: str) -> str:
    """Return the command that restores the files of a killed run before it does anything else."""
    found = results_folder(Path(folder))
    results = found if str(found) != folder else Path(folder).parents[2]
    return f"nfold explain SCRIPT --results {results}"
