"""The file system as links: folders and files become real when something in them is written.

``root/home/ada/train.py`` stands for ``/home/ada/train.py``. A folder that nobody wrote to is one
link; one with something written in it is a real folder of links.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import stat
import tempfile
from pathlib import Path
from typing import IO

from nfold.frameworks.scratch.locks import held

MOST_BESIDE = 1000
"""Entries of a folder above the working directory; of a larger one only the way down is there."""
MOST_COPIED_BYTES = 4 << 30
"""Of one file that is not written from its beginning."""
MOST_LINKS = 40
"""Links that a path may go through, as in the kernel."""
AT_FDCWD, RENAME_EXCHANGE = -100, 2


class Mirror:
    """The links below ``root``; processes that share it take turns by a lock beside it.

    ``hidden`` is a real folder that is left out: the one that the root itself lies in.
    """

    def __init__(self, root: str, hidden: str = "") -> None:
        self.root = root
        self._hidden = hidden

    def holds(self, path: str) -> bool:
        """Whether an absolute path is below the root."""
        return path == self.root or path.startswith(self.root + os.sep)

    def place(self, path: str) -> str:
        """Where an absolute path of the real file system appears."""
        return path if self.holds(path) else self.root + path.rstrip(os.sep)

    def meant(self, place: str) -> str:
        """The path of the real file system that a place stands for."""
        return os.path.normpath(place)[len(self.root) :] or os.sep

    def make(self, *folders: str) -> None:
        """Make the way to each of these real folders, and links to all that is in it."""
        with self._turn():
            for folder in folders:
                self._make_way(folder)

    def writable(self, path: str, *, follow: bool, empty: bool = False) -> str:
        """The place where a path below the root is written; every folder on its way is real.

        With ``follow`` what a link at its end shows is made real too: a folder of links, or a
        copy of the file, without its content where ``empty`` says that this goes at once.
        """
        with self._turn():
            place = self._walk(path, follow)
            if follow and os.path.islink(place):
                self._make_real(place, empty=empty)
            return place

    def _make_way(self, folder: str) -> None:
        here = os.sep
        for name in [*_parts(folder), ""]:
            place = self.place(here)
            if os.path.islink(place):
                os.unlink(place)
            os.makedirs(place, exist_ok=True)
            self._fill(place, here, way=name)
            here = os.path.join(here, name)

    def _make_real(self, place: str, *, empty: bool = False) -> None:
        """Put what a link shows in its place: a folder of links, or a file of its own."""
        target = os.path.join(os.path.dirname(place), os.readlink(place))
        if os.path.isdir(target):
            made = tempfile.mkdtemp(prefix=".nfold-", dir=os.path.dirname(place))
            os.chmod(made, os.stat(target).st_mode | stat.S_IRWXU)
            self._fill(made, target, beside=self.place(target) == place)
            _exchange(made, place)
        elif os.path.isfile(target):
            made = f"{place}.nfold-{os.getpid()}"
            _copy(target, made, empty=empty)
            os.replace(made, place)
        elif not os.path.exists(target):
            os.unlink(place)

    def _fill(self, place: str, source: str, *, way: str = "", beside: bool = True) -> None:
        """Links to the entries of ``source``; where they are too many, only the ``way`` on.

        A link between neighbours stays one where the neighbours are ``beside`` it too.
        """
        names = os.listdir(source)
        if way and len(names) > MOST_BESIDE:
            names = [way]
        for name in set(names) - set(os.listdir(place)):
            real = os.path.join(source, name)
            if real != self._hidden:
                neighbour = _neighbour(real) if beside else None
                os.symlink(neighbour or real, os.path.join(place, name))

    def _walk(self, path: str, follow: bool) -> str:
        """The place at the end of ``path``, with the folders on the way made real."""
        place, rest, links = self.root, _parts(path[len(self.root) :])[::-1], 0
        while rest:
            name = rest.pop()
            if name == os.pardir:
                place = place if place == self.root else os.path.dirname(place)
                continue
            here = os.path.join(place, name)
            if not os.path.islink(here) or not (rest or follow) or links == MOST_LINKS:
                place = here
                continue
            links += 1
            target = os.readlink(here)
            if self.holds(target):
                place, rest = self.root, rest + _parts(target[len(self.root) :])[::-1]
            elif not os.path.isabs(target):
                rest += _parts(target)[::-1]
            else:
                if rest:
                    self._make_real(here)
                place = here
        return place

    def _turn(self) -> IO[bytes]:
        return held(Path(f"{self.root}.turn"))


def _parts(path: str) -> list[str]:
    return [part for part in path.split(os.sep) if part not in ("", os.curdir)]


def _neighbour(real: str) -> str | None:
    """What a link shows, if that is in its own folder or below it."""
    target = os.readlink(real) if os.path.islink(real) else os.sep
    away = os.path.isabs(target) or os.pardir in target.split(os.sep)
    return None if away else target


def _copy(source: str, made: str, *, empty: bool) -> None:
    if empty:
        with open(made, "wb"):
            shutil.copymode(source, made)
    else:
        size = os.path.getsize(source)
        if size > MOST_COPIED_BYTES:
            raise PermissionError(
                f"{source} has {size / 1e9:.1f} GB, nfold copies at most "
                f"{MOST_COPIED_BYTES / 1e9:.1f} GB of a file that a script changes; next: open it "
                "for reading, or explain the script with a smaller one"
            )
        shutil.copy2(source, made)
    os.chmod(made, os.stat(made).st_mode | stat.S_IWUSR)


def _exchange(made: str, link: str) -> None:
    """Put the folder in the link's place; at no moment is nothing there, where the kernel can."""
    try:
        swap = ctypes.CDLL(None, use_errno=True).renameat2
        failed = swap(AT_FDCWD, os.fsencode(made), AT_FDCWD, os.fsencode(link), RENAME_EXCHANGE)
    except (AttributeError, OSError):
        failed = -1
    if failed:
        os.unlink(link)
        os.rename(made, link)
    else:
        os.unlink(made)
