"""The database file: safe opening, durability, the schema and translation of errors."""

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
BUSY_TIMEOUT_S = 30.0  # for another writer; an append takes a millisecond
RETRY_S = 0.01
MIN_FREE_BYTES = 4 * 2**20  # for a log, a journal and a row at the same time

_HEADER_BYTES = 100
_VERSION_OFFSET = slice(60, 64)
_MAGIC = b"SQLite format 3\0"


def open_writable(path: Path) -> sqlite3.Connection:
    """Open a durable connection to the store at ``path``, and create the store if necessary.

    Raises StoreUnusable if the file has a newer schema (it is not changed), is not a store, or
    cannot be written.
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
            _create_tables(connection, path)
        return connection


def open_readonly(path: Path) -> sqlite3.Connection:
    """Open a connection that writes nothing; the folder may be read-only.

    Raises StoreUnusable if there is no store, or as ``open_writable`` does.
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
    # Reads the version without changing the file: from the header (SQLite file format, section 1.3:
    # big-endian at offset 60), and through a read-only connection if a write-ahead log may contain
    # a newer header.
    with path.open("rb") as file:
        header = file.read(_HEADER_BYTES)
    version = int.from_bytes(header[_VERSION_OFFSET], "big") if header.startswith(_MAGIC) else 0
    if version <= SCHEMA_VERSION and Path(f"{path}-wal").exists():
        with closing(_read_only(path)) as connection:
            version = _version(connection)
    if version > SCHEMA_VERSION:
        raise StoreUnusable(
            f"{path} has schema version {version}, this nfold supports up to {SCHEMA_VERSION}; "
            "next: pip install --upgrade nfold, or choose another --results folder"
        )


def _refuse_full_disk(path: Path) -> None:
    free = shutil.disk_usage(path.parent).free
    if free < MIN_FREE_BYTES:
        raise StoreUnusable(
            f"{path}: {free / 2**20:.1f} MiB are free on its disk, {MIN_FREE_BYTES // 2**20} MiB "
            "are needed; next: make room, or choose another --results folder"
        )


def _read_only(path: Path) -> sqlite3.Connection:
    mode = "mode=ro" if os.access(path.parent, os.W_OK) else "immutable=1"
    uri = f"{path.resolve().as_uri()}?{mode}"
    return sqlite3.connect(uri, uri=True, timeout=BUSY_TIMEOUT_S, isolation_level=None)


def _set_journal(connection: sqlite3.Connection) -> None:
    try:
        mode = _request_wal(connection)
    except sqlite3.OperationalError as error:
        if _primary(error) not in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN):
            raise
        mode = "refused"
    if mode != "wal":
        connection.execute("PRAGMA journal_mode = DELETE")


def _request_wal(connection: sqlite3.Connection) -> str:
    # SQLite's busy timeout does not cover changes of the journal mode, so that two processes that
    # create the same store at the same time have to wait here.
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


def _create_tables(connection: sqlite3.Connection, path: Path) -> None:
    with transaction(connection):  # also without changes: proves that the file is writable
        if _version(connection) != 0:
            return
        if connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()[0]:
            raise StoreUnusable(f"{path} is another program's database; next: move it away")
        schema = resources.files("nfold.store").joinpath("schema.sql").read_text(encoding="utf-8")
        for statement in schema.split(";\n"):
            connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Run a transaction. Takes the write lock first, and waits here for other writers."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")


@contextmanager
def translate_errors(path: Path) -> Iterator[None]:
    """Translate errors of SQLite and of the file system to StoreUnusable."""
    try:
        yield
    except sqlite3.Error as error:
        unknown = f"cannot be used: {error}; next: move it away, or choose another --results folder"
        raise StoreUnusable(f"{path} {_MEANINGS.get(_primary(error), unknown)}") from error
    except OSError as error:
        raise StoreUnusable(
            f"{path}: {error.strerror or error}; next: choose another --results folder"
        ) from error


_MEANINGS = {
    sqlite3.SQLITE_NOTADB: "is not a store; next: move it away, or choose another --results folder",
    sqlite3.SQLITE_CORRUPT: "is damaged; next: move it away, or restore it from a copy",
    sqlite3.SQLITE_READONLY: "cannot be written; next: choose another --results folder",
    sqlite3.SQLITE_CANTOPEN: "cannot be opened; next: choose another --results folder",
    sqlite3.SQLITE_FULL: "is on a full disk; next: make room; stored measurements are intact",
    sqlite3.SQLITE_IOERR: "is on a failing or full disk; next: make room, check the disk",
    sqlite3.SQLITE_BUSY: (
        f"was held by another process for {BUSY_TIMEOUT_S:.0f} s; next: wait for it to end"
    ),
}


def _primary(error: sqlite3.Error) -> int:
    code: int = getattr(error, "sqlite_errorcode", 0)
    return code & 0xFF
