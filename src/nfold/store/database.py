"""The database file: opening it safely, durability, the schema, and what its errors mean."""

from __future__ import annotations

import os
import shutil
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from importlib import resources
from pathlib import Path

from nfold.core.errors import StoreUnusable

SCHEMA_VERSION = 1
BUSY_TIMEOUT_S = 30.0
"""How long a writer waits for another one; an append takes a millisecond."""
RETRY_S = 0.01
MIN_FREE_BYTES = 4 * 2**20
"""Less free space than this is a full disk: a log, a journal and a row need room at once."""

_HEADER_BYTES = 100
_VERSION_OFFSET = slice(60, 64)
_MAGIC = b"SQLite format 3\0"


def open_writable(path: Path) -> sqlite3.Connection:
    """A durable connection to the store at ``path``, which is made where it does not exist.

    Raises StoreUnusable where the file is of a newer schema, which is left byte for byte as it
    is, and where it is no store or cannot be written.
    """
    with translate_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            _refuse_newer(path)
        _refuse_full_disk(path)
        connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None)
        with _closed_on_error(connection):
            _set_journal(connection)
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("PRAGMA foreign_keys = ON")
            _make_tables(connection, path)
        return connection


def open_readonly(path: Path) -> sqlite3.Connection:
    """A connection that writes nothing; for a folder that is read-only too.

    Raises StoreUnusable where there is no store, or where ``open_to_write`` would.
    """
    with translate_errors(path):
        if not path.exists():
            raise StoreUnusable(
                f"{path} does not exist: nothing was measured there; "
                "next: nfold bench digits, or name the folder with --results"
            )
        _refuse_newer(path)
        connection = _read_only(path)
        with _closed_on_error(connection):
            if _version(connection) == 0:
                raise StoreUnusable(f"{path} holds no measurements; next: nfold bench digits")
        return connection


@contextmanager
def _closed_on_error(connection: sqlite3.Connection) -> Iterator[None]:
    try:
        yield
    except BaseException:
        connection.close()
        raise


def _refuse_newer(path: Path) -> None:
    """Look at the version without changing a byte.

    First in the database's header (SQLite file format, section 1.3: big-endian at offset 60),
    then, where a write-ahead log may hold a younger header, through a read-only connection.
    """
    with path.open("rb") as file:
        header = file.read(_HEADER_BYTES)
    version = int.from_bytes(header[_VERSION_OFFSET], "big") if header.startswith(_MAGIC) else 0
    if version <= SCHEMA_VERSION and Path(f"{path}-wal").exists():
        with closing(_read_only(path)) as connection:
            version = _version(connection)
    if version > SCHEMA_VERSION:
        raise StoreUnusable(
            f"{path} has schema version {version}, this nfold knows up to {SCHEMA_VERSION}; "
            "next: pip install --upgrade nfold, or choose another --results folder"
        )


def _refuse_full_disk(path: Path) -> None:
    free = shutil.disk_usage(path.parent).free
    if free < MIN_FREE_BYTES:
        raise StoreUnusable(
            f"{path}: {free / 2**20:.1f} MiB are free there, {MIN_FREE_BYTES // 2**20} MiB are "
            "needed; next: make room, or choose another --results folder"
        )


def _read_only(path: Path) -> sqlite3.Connection:
    mode = "mode=ro" if os.access(path.parent, os.W_OK) else "immutable=1"
    uri = f"{path.resolve().as_uri()}?{mode}"
    return sqlite3.connect(uri, uri=True, timeout=BUSY_TIMEOUT_S, isolation_level=None)


def _set_journal(connection: sqlite3.Connection) -> None:
    try:
        mode = _ask_for_log(connection)
    except sqlite3.OperationalError as error:
        if _primary(error) not in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN):
            raise
        mode = "refused"
    if mode != "wal":
        connection.execute("PRAGMA journal_mode = DELETE")


def _ask_for_log(connection: sqlite3.Connection) -> str:
    """The journal mode that SQLite answers with.

    Two processes that make the same store at the same moment: SQLite does not wait for the
    other one here (its busy timeout does not cover a change of journal), so it is waited here.
    """
    until = time.monotonic() + BUSY_TIMEOUT_S
    while True:
        try:
            mode: str = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
            return mode
        except sqlite3.OperationalError as error:
            if _primary(error) != sqlite3.SQLITE_BUSY or time.monotonic() > until:
                raise
        time.sleep(RETRY_S)


def _version(connection: sqlite3.Connection) -> int:
    version: int = connection.execute("PRAGMA user_version").fetchone()[0]
    return version


def _make_tables(connection: sqlite3.Connection, path: Path) -> None:
    """In a new file, the tables: in one transaction, so that others see none or all of them.

    The transaction is begun in an old file too: it proves that the file can be written.
    """
    with transaction(connection):
        if _version(connection) != 0:
            return
        if connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()[0]:
            raise StoreUnusable(f"{path} is another program's database; next: move it away")
        for statement in _statements():
            connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


def _statements() -> list[str]:
    schema = resources.files("nfold.store").joinpath("schema.sql").read_text(encoding="utf-8")
    return [statement for statement in schema.split(";\n") if statement.strip()]


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """All or nothing. Takes the write lock first: only here another writer is waited for."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")


@contextmanager
def translate_errors(path: Path) -> Iterator[None]:
    """SQLite's and the file system's errors become StoreUnusable here and nowhere else."""
    try:
        yield
    except sqlite3.Error as error:
        raise StoreUnusable(f"{path} {_meaning(error)}") from error
    except OSError as error:
        raise StoreUnusable(
            f"{path}: {error.strerror or error}; next: choose another --results folder"
        ) from error


_MEANINGS = {
    sqlite3.SQLITE_NOTADB: "is not a store; next: move it away, or choose another --results folder",
    sqlite3.SQLITE_CORRUPT: "is damaged; next: move it away, or restore it from a copy",
    sqlite3.SQLITE_READONLY: "cannot be written; next: choose another --results folder",
    sqlite3.SQLITE_CANTOPEN: "cannot be opened; next: choose another --results folder",
    sqlite3.SQLITE_FULL: "is on a full disk; next: make room; what was stored is intact",
    sqlite3.SQLITE_IOERR: "is on a disk that fails or is full; next: make room, look at the disk",
    sqlite3.SQLITE_BUSY: (
        f"was held by another process for {BUSY_TIMEOUT_S:.0f} s; next: wait for that one to end"
    ),
}


def _primary(error: sqlite3.Error) -> int:
    code: int = getattr(error, "sqlite_errorcode", 0)
    return code & 0xFF


def _meaning(error: sqlite3.Error) -> str:
    unknown = f"cannot be used: {error}; next: move it away, or choose another --results folder"
    return _MEANINGS.get(_primary(error), unknown)
