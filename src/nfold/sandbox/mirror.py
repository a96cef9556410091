"""A copy-on-write mirror of the file system, made of links.

``root/home/ada/train.py`` mirrors ``/home/ada/train.py``. An unchanged folder is one link; a folder
in which something was written is a real folder of links.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import stat
import tempfile
from pathlib import Path
from typing import IO

from nfold.sandbox.file_lock import lock_file

# Of a larger folder above the working directory only the entry on the path is mirrored.
MAX_LINKED_ENTRIES = 1000
MAX_COPIED_BYTES = 4 << 30  # of a file that is not truncated when it is opened
MAX_LINK_DEPTH = 40  # as in the kernel
AT_FDCWD, RENAME_EXCHANGE = -100, 2


class CopyOnWriteMirror:
    """The mirror below ``root``, shared by processes under a lock.

    ``hidden`` is a real folder that is not mirrored: the folder that contains the root.
    """

    def __init__(self, root: str, hidden: str = "") -> None:
        self.root = root
        self._hidden = hidden

    def contains(self, path: str) -> bool:
        return path == self.root or path.startswith(self.root + os.sep)

    def to_mirror(self, path: str) -> str:
        """Return the path in the mirror of an absolute real path."""
        return path if self.contains(path) else self.root + path.rstrip(os.sep)

    def to_real(self, path: str) -> str:
        """Return the real path of a path in the mirror."""
        return os.path.normpath(path)[len(self.root) :] or os.sep

    def create(self, *folders: str) -> None:
        """Create these real folders in the mirror, with links to their entries."""
        with self._lock():
            for folder in folders:
                self._create_path(folder)

    def make_writable(self, path: str, *, follow: bool, empty: bool = False) -> str:
        """Return the path to write to, after every folder on the path has been made real.

        With ``follow`` a link at the end of the path is replaced by a folder of links or a copy of
        the file; with ``empty`` by an empty file.
        """
        with self._lock():
            place = self._resolve(path, follow)
            if follow and os.path.islink(place):
                self._materialize(place, empty=empty)
            return place

    def _create_path(self, folder: str) -> None:
        here = os.sep
        for name in [*_parts(folder), ""]:
            place = self.to_mirror(here)
            if os.path.islink(place):
                os.unlink(place)
            os.makedirs(place, exist_ok=True)
            self._link_entries(place, here, only_entry=name)
            here = os.path.join(here, name)

    def _materialize(self, link: str, *, empty: bool = False) -> None:
        target = os.path.join(os.path.dirname(link), os.readlink(link))
        if os.path.isdir(target):
            made = tempfile.mkdtemp(prefix=".nfold-", dir=os.path.dirname(link))
            os.chmod(made, os.stat(target).st_mode | stat.S_IRWXU)
            self._link_entries(made, target, keep_relative=self.to_mirror(target) == link)
            _swap(made, link)
        elif os.path.isfile(target):
            made = f"{link}.nfold-{os.getpid()}"
            _copy(target, made, empty=empty)
            os.replace(made, link)
        elif not os.path.exists(target):
            os.unlink(link)

    def _link_entries(
        self, folder: str, source: str, *, only_entry: str = "", keep_relative: bool = True
    ) -> None:
        # With too many entries only ``only_entry`` is linked. Relative links between entries of
        # one folder stay relative if the mirror has these entries, too.
        names = os.listdir(source)
        if only_entry and len(names) > MAX_LINKED_ENTRIES:
            names = [only_entry]
        for name in set(names) - set(os.listdir(folder)):
            real = os.path.join(source, name)
            if real != self._hidden:
                neighbour = _relative_target(real) if keep_relative else None
                os.symlink(neighbour or real, os.path.join(folder, name))

    def _resolve(self, path: str, follow: bool) -> str:
        place, rest, links = self.root, _parts(path[len(self.root) :])[::-1], 0
        while rest:
            name = rest.pop()
            if name == os.pardir:
                place = place if place == self.root else os.path.dirname(place)
                continue
            here = os.path.join(place, name)
            if not os.path.islink(here) or not (rest or follow) or links == MAX_LINK_DEPTH:
                place = here
                continue
            links += 1
            target = os.readlink(here)
            if self.contains(target):
                place, rest = self.root, rest + _parts(target[len(self.root) :])[::-1]
            elif not os.path.isabs(target):
                rest += _parts(target)[::-1]
            else:
                if rest:
                    self._materialize(here)
                place = here
        return place

    def _lock(self) -> IO[bytes]:
        return lock_file(Path(f"{self.root}.lock"))


def _parts(path: str) -> list[str]:
    return [part for part in path.split(os.sep) if part not in ("", os.curdir)]


def _relative_target(real: str) -> str | None:
    target = os.readlink(real) if os.path.islink(real) else os.sep
    away = os.path.isabs(target) or os.pardir in target.split(os.sep)
    return None if away else target


def _copy(source: str, target: str, *, empty: bool) -> None:
    if empty:
        with open(target, "wb"):
            shutil.copymode(source, target)
    else:
        size = os.path.getsize(source)
        if size > MAX_COPIED_BYTES:
            raise large_file_error(source, size)
        shutil.copy2(source, target)
    os.chmod(target, os.stat(target).st_mode | stat.S_IWUSR)


def large_file_error(path: str, size: int) -> PermissionError:
    """Return the error for a script that changes a file too large to copy."""
    return PermissionError(
        f"{path} has {size / 1e9:.1f} GB, nfold copies at most {MAX_COPIED_BYTES / 1e9:.1f} GB of "
        "a file that a script changes; next: open it for reading, or explain the script with a "
        "smaller one"
    )


def _swap(folder: str, link: str) -> None:
    try:
        swap = ctypes.CDLL(None, use_errno=True).renameat2
        failed = swap(AT_FDCWD, os.fsencode(folder), AT_FDCWD, os.fsencode(link), RENAME_EXCHANGE)
    except (AttributeError, OSError):
        failed = -1
    if failed:
        os.unlink(link)
        os.rename(folder, link)
    else:
        os.unlink(folder)
