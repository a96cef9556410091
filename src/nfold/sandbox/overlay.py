"""A view of the file system in which every write goes to a folder of nfold (Linux).

A mount namespace with overlay file systems, see mount_namespaces(7), user_namespaces(7) and
Documentation/filesystems/overlayfs.rst of the kernel. It holds for the process that enters it and
for all that it starts later: C libraries, ``cp``, ``git``, a script that replaces itself by exec.

    folder/upper<name>/K/files    what was written below the K-th overlay, whose path is in K/path

Caches that outlive every run, devices and the results folder stay as they are.
"""

from __future__ import annotations

import contextlib
import ctypes
import getpass
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000
MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 0x1, 0x20, 0x1000, 0x4000, 0x40000
LOCKED_FLAGS = 0x2 | 0x4 | 0x8 | 0x400 | 0x800  # nosuid, nodev, noexec, noatime, nodiratime
MNT_DETACH = 2
CAP_SYS_ADMIN = 21
PIVOT_ROOT_CALL = {"x86_64": 155, "aarch64": 41}
VIRTUAL_FOLDERS = ("/dev", "/proc", "/sys", "/run")
VIRTUAL_TYPES = ("autofs", "devtmpfs", "proc", "sysfs")
OCTAL = re.compile(rb"\\([0-7]{3})")
UPPER, VIEW = "upper", "view"
MODE_VARIABLE, JOURNAL_ONLY = "NFOLD_SANDBOX", "journal"
STATE_VARIABLE, SHARED, PER_RANK, ENTERED = "NFOLD_OVERLAY", "shared", "per-rank", "entered"


def enter_overlay(folder: Path, name: str, kept: Sequence[str], overlaid: Sequence[str]) -> None:
    """Move this process, which has one thread, into a view in which it changes nothing outside.

    Paths and the working directory stay the same. Below the ``kept`` folders writes are real, but
    not below an ``overlaid`` folder inside of one. Raises OSError if the machine does not allow it.
    """
    unshare_mounts()
    _mount_view(folder, name, kept, overlaid)


def unshare_mounts() -> None:
    """Give this process a mount namespace, and without CAP_SYS_ADMIN a user namespace, too."""
    uid, gid = os.geteuid(), os.getegid()
    if _may_mount():
        _call("unshare", CLONE_NEWNS)
    else:
        _call("unshare", CLONE_NEWUSER | CLONE_NEWNS)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    _mount(None, "/", MS_REC | MS_PRIVATE)


def _mount_view(folder: Path, name: str, kept: Sequence[str], overlaid: Sequence[str]) -> None:
    """Mount the view and make it the root of this process."""
    here, view = os.getcwd(), _View(folder, name)
    view.show("/")
    special = dict.fromkeys((*kept, str(folder)), view.bind)
    inside = [path for path in overlaid if any(_is_below(path, one) for one in special)]
    special |= dict.fromkeys(inside, view.show)
    for path in sorted(filter(os.path.isdir, special), key=lambda path: path.count(os.sep)):
        special[path](path)
    os.chdir(view.root)
    _check(_LIBC.syscall(PIVOT_ROOT_CALL[os.uname().machine], b".", b"."), "pivot_root")
    _call("umount2", b".", MNT_DETACH)
    os.chdir(here)
    os.environ[STATE_VARIABLE] = ENTERED


def views_are_allowed() -> bool:
    """Return whether scripts of this process may run in a view; see ``unprotected_reason``."""
    return os.environ.get(MODE_VARIABLE) != JOURNAL_ONLY


def unavailable_reason(folder: Path) -> str | None:
    """Return why processes cannot have a view with ``folder``, or None if they can.

    Tried in a process of its own.
    """
    if not views_are_allowed():
        return f"{MODE_VARIABLE}={JOURNAL_ONLY} is set"
    if not sys.platform.startswith("linux"):
        return "it needs Linux"
    command = [sys.executable, "-P", "-m", __name__, str(folder)]
    tried = subprocess.run(command, capture_output=True, text=True, check=False)
    last = (tried.stderr.strip().splitlines() or [f"exit code {tried.returncode}"])[-1]
    remove_uppers(folder)
    return None if tried.returncode == 0 else last.rpartition("Error: ")[2]


def written_files(folder: Path) -> list[tuple[str, int]]:
    """Return real path and size of each file written below ``folder``, the first written first."""
    found = []
    for note in folder.glob(f"{UPPER}*/*/path"):
        upper, target = note.parent, os.fsdecode(note.read_bytes())
        for place, _, names in os.walk(upper / "files"):
            for file in (os.path.join(place, name) for name in names):
                status = os.lstat(file)
                if stat.S_ISREG(status.st_mode):
                    real = os.path.join(target, os.path.relpath(file, upper / "files"))
                    found.append((status.st_mtime_ns, real, status.st_size))
    return [(path, size) for _, path, size in sorted(found)]


def remove_uppers(folder: Path) -> None:
    """Delete everything that was written below ``folder``."""
    for upper in folder.glob(f"{UPPER}*"):
        for work in upper.glob("*/work/work"):
            work.chmod(stat.S_IRWXU)  # the kernel leaves it without any permission
        shutil.rmtree(upper, ignore_errors=True)


def temporary_caches() -> list[str]:
    """Return the folders below the temporary folder that outlive every run."""
    temporary = tempfile.gettempdir()
    compiled = os.path.join(temporary, f"torchinductor_{getpass.getuser()}")
    os.makedirs(compiled, exist_ok=True)
    return [compiled, os.path.join(temporary, "nvidia-mps"), os.path.join(temporary, ".X11-unix")]


class _View:
    def __init__(self, folder: Path, name: str) -> None:
        self._uppers = folder / f"{UPPER}{name}"
        self._count = 0
        self._mounts = _mount_points()
        self.root = str(folder / f"{VIEW}{name}")
        os.makedirs(self.root, exist_ok=True)

    def show(self, path: str) -> None:
        """Show a folder as an overlay, or entry by entry if there are mount points below it.

        In a user namespace a folder above a mount point cannot be the lower layer of an overlay.
        """
        is_virtual = path in VIRTUAL_FOLDERS or self._mounts.get(path) in VIRTUAL_TYPES
        if is_virtual or not os.access(path, os.R_OK | os.X_OK):
            self.bind(path)
        elif any(_is_below(mount, path) for mount in self._mounts):
            place = self._place(path)
            os.makedirs(place, exist_ok=True)
            _mount("tmpfs", place, 0, kind="tmpfs", data="mode=0755")
            for entry in os.scandir(path):
                try:
                    self._show_entry(entry)
                except FileNotFoundError:
                    if os.path.lexists(entry.path):  # otherwise it was deleted meanwhile
                        raise
            os.chmod(place, stat.S_IMODE(os.stat(path).st_mode))
        else:
            self._overlay(path)

    def bind(self, path: str) -> None:
        place = self._place(path)
        os.makedirs(place, exist_ok=True)
        _mount(path, place, MS_BIND | MS_REC)

    def _show_entry(self, entry: os.DirEntry[str]) -> None:
        place = self._place(entry.path)
        if entry.is_symlink():
            os.symlink(os.readlink(entry.path), place)
        elif entry.is_dir():
            self.show(entry.path)
        elif entry.is_file():
            Path(place).touch()
            _mount(entry.path, place, MS_BIND)
            locked = os.statvfs(place).f_flag & LOCKED_FLAGS
            _mount(None, place, MS_REMOUNT | MS_BIND | MS_RDONLY | locked)

    def _overlay(self, path: str) -> None:
        self._count += 1
        layer, place, status = self._uppers / str(self._count), self._place(path), os.stat(path)
        layer.mkdir(parents=True)
        (layer / "path").write_bytes(os.fsencode(path))
        for name in ("files", "work"):
            (layer / name).mkdir()
        os.makedirs(place, exist_ok=True)
        if os.geteuid() == 0:
            with contextlib.suppress(OSError):  # not mapped into this user namespace
                os.chown(layer / "files", status.st_uid, status.st_gid)
        os.chmod(layer / "files", stat.S_IMODE(status.st_mode))
        parts = {"lowerdir": path, "upperdir": layer / "files", "workdir": layer / "work"}
        options = [f"{key}={_escape(str(value))}" for key, value in parts.items()]
        _mount("overlay", place, 0, kind="overlay", data=",".join([*options, "userxattr"]))

    def _place(self, path: str) -> str:
        return self.root + path.rstrip("/")


def _mount_points() -> dict[str, str]:
    found = {}
    for line in Path("/proc/self/mountinfo").read_bytes().splitlines():
        before, _, behind = line.partition(b" - ")
        # proc(5): a blank in a name is written as \040
        path = OCTAL.sub(lambda code: bytes([int(code[1], 8)]), before.split()[4])
        found[os.fsdecode(path)] = os.fsdecode(behind.split()[0])
    return found


def _is_below(path: str, folder: str) -> bool:
    return path != folder and path.startswith(folder.rstrip("/") + "/")


def _escape(path: str) -> str:
    return path.replace("\\", "\\\\").replace(",", "\\,").replace(":", "\\:")


def _may_mount() -> bool:
    status = Path("/proc/self/status").read_text()
    effective = next(line for line in status.splitlines() if line.startswith("CapEff"))
    return bool(int(effective.split()[1], 16) >> CAP_SYS_ADMIN & 1)


_LIBC = ctypes.CDLL(None, use_errno=True)


def _mount(
    source: str | None, target: str, flags: int, *, kind: str | None = None, data: str | None = None
) -> None:
    texts = [None if text is None else os.fsencode(text) for text in (source, target, kind, data)]
    _check(_LIBC.mount(*texts[:3], ctypes.c_ulong(flags), texts[3]), f"mount {kind or ''} {target}")


def _call(name: str, *arguments: object) -> None:
    _check(getattr(_LIBC, name)(*arguments), name)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


if __name__ == "__main__":
    enter_overlay(Path(sys.argv[1]), "", [], [])
