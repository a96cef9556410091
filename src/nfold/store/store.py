"""The store of measurements: safe opening, durability, the schema, translation of errors.

Every append is one transaction that is on the disk when the call returns: write-ahead log with
``synchronous=FULL`` (SQLite, PRAGMA synchronous), or a rollback journal.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sqlite3
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Self

from nfold.core.errors import StoreUnusable, UsageError
from nfold.core.measurement import Measurement

DATABASE_FILE = "nfold.db"
SCHEMA_VERSION = 1
SCHEMA = """
-- Version 1 of the store. Any change here is a new version, with a migration.

CREATE TABLE machine (
    hash     TEXT PRIMARY KEY,          -- SHA-256 of the document
    document TEXT NOT NULL              -- JSON of a Machine
) WITHOUT ROWID;

CREATE TABLE measurement (
    number     INTEGER PRIMARY KEY,     -- order of arrival
    id         TEXT NOT NULL UNIQUE,
    cell       TEXT NOT NULL,           -- the same for all repeats of one question
    repeat     INTEGER NOT NULL,
    workload   TEXT NOT NULL,           -- name with its parameters
    name       TEXT NOT NULL,           -- name without them
    plan_id    TEXT NOT NULL,
    status     TEXT NOT NULL,
    started_at TEXT NOT NULL,           -- UTC, ISO 8601
    machine    TEXT NOT NULL REFERENCES machine (hash),
    document   TEXT NOT NULL            -- JSON of a Measurement without its machine
);

CREATE INDEX measurement_question ON measurement (cell, repeat);
"""
BUSY_TIMEOUT_S = 30.0  # for another writer; an append takes a millisecond
RETRY_S = 0.01
MIN_FREE_BYTES = 4 * 2**20  # for a log, a journal and a row at the same time

_SELECT = """
SELECT measurement.id, measurement.document, machine.document
FROM measurement JOIN machine ON machine.hash = measurement.machine
"""
_LATEST = "number IN (SELECT MAX(number) FROM measurement GROUP BY cell, repeat)"
_OF_WORKLOAD = ":workload IN (measurement.workload, measurement.name)"

_INSERT_MACHINE = "INSERT OR IGNORE INTO machine VALUES (:machine, :machine_document)"
_INSERT = """
INSERT INTO measurement
    (id, cell, repeat, workload, name, plan_id, status, started_at, machine, document)
VALUES
    (:id, :cell, :repeat, :workload, :name, :plan_id, :status, :started_at, :machine, :document)
"""


class Store:
    """The measurements of one results folder. Use as a context manager."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.path = path
        self._connection = connection

    @classmethod
    def open(cls, results: Path) -> Store:
        """Open the store of a results folder for writing, and create it if necessary.

        Raises StoreUnusable if the file is not a store, has a newer schema, or cannot be written.
        """
        return cls(results / DATABASE_FILE, open_writable(results / DATABASE_FILE))

    @classmethod
    def open_readonly(cls, results: Path) -> Store:
        """Open the store of a results folder for reading. Raises StoreUnusable without a store."""
        return cls(results / DATABASE_FILE, open_readonly(results / DATABASE_FILE))

    def append(self, measurement: Measurement) -> None:
        """Store a measurement durably. Raises StoreUnusable if it cannot be written."""
        row = _row(measurement)
        with translate_errors(self.path), transaction(self._connection):
            self._connection.execute(_INSERT_MACHINE, row)
            self._connection.execute(_INSERT, row)

    def measurements(self, workload: str | None = None) -> list[Measurement]:
        """Return the latest measurement of every (cell, repeat), oldest first.

        ``workload`` selects a written form (``conv2d:size=50``) or a name with any parameters.
        """
        condition = _LATEST if workload is None else f"{_LATEST} AND {_OF_WORKLOAD}"
        named = {} if workload is None else {"workload": workload}
        return self._select(f"{_SELECT} WHERE {condition} ORDER BY number", named)

    def find(self, cell: str, repeat: int) -> Measurement | None:
        """Return the latest measurement of a cell's repeat, or None."""
        condition = "cell = :cell AND repeat = :repeat ORDER BY number DESC LIMIT 1"
        found = self._select(f"{_SELECT} WHERE {condition}", {"cell": cell, "repeat": repeat})
        return found[0] if found else None

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _select(self, query: str, named: Mapping[str, str | int]) -> list[Measurement]:
        with translate_errors(self.path):
            rows = self._connection.execute(query, named).fetchall()
        return [self._measurement(*row) for row in rows]

    def _measurement(self, name: str, document: str, machine: str) -> Measurement:
        try:
            values: dict[str, Any] = json.loads(document)
            values["machine"] = json.loads(machine)
            return Measurement.from_dict(values)
        except (ValueError, UsageError) as error:
            raise StoreUnusable(
                f"{self.path}: measurement {name!r} cannot be read ({error}); "
                "next: use the nfold version that wrote it, or another --results folder"
            ) from None


def _row(measurement: Measurement) -> dict[str, str | int]:
    values = measurement.to_dict()
    machine = json.dumps(values.pop("machine"))
    return {
        "id": measurement.id,
        "cell": measurement.cell,
        "repeat": measurement.repeat,
        "workload": str(measurement.workload),
        "name": measurement.workload.name,
        "plan_id": measurement.plan.id,
        "status": measurement.status,
        "started_at": measurement.started_at,
        "machine": hashlib.sha256(machine.encode()).hexdigest(),
        "machine_document": machine,
        "document": json.dumps(values),
    }


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
        header = file.read(100)
    is_sqlite = header.startswith(b"SQLite format 3\0")
    version = int.from_bytes(header[60:64], "big") if is_sqlite else 0
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
        for statement in SCHEMA.split(";\n"):
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
