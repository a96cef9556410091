"""The store: append a measurement durably, find it again.

Every append is one transaction that is on the disk when the call returns: write-ahead log and
``synchronous=FULL`` (SQLite, PRAGMA synchronous), or a rollback journal that does the same.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from nfold.core.errors import StoreUnusable, UsageError
from nfold.core.measurement import Measurement
from nfold.store.database import open_readonly, open_writable, transaction, translate_errors

DATABASE_FILE = "nfold.db"

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
    """The measurements of one results folder. Use as a context manager, or ``close`` it."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.path = path
        self._connection = connection

    @classmethod
    def open(cls, results: Path) -> Store:
        """The store of a results folder, to write and read; made where it does not exist.

        Raises StoreUnusable where the file is no store, is of a newer schema (it is left
        untouched), or cannot be written; the message says which, and the next step.
        """
        return cls(results / DATABASE_FILE, open_writable(results / DATABASE_FILE))

    @classmethod
    def open_readonly(cls, results: Path) -> Store:
        """The store of a results folder, only to read. Raises StoreUnusable where there is none."""
        return cls(results / DATABASE_FILE, open_readonly(results / DATABASE_FILE))

    def append(self, measurement: Measurement) -> None:
        """Add one measurement; it is durable when this returns.

        Raises StoreUnusable where it cannot be written; nothing of it is then in the store.
        """
        row = _row(measurement)
        with translate_errors(self.path), transaction(self._connection):
            self._connection.execute(_INSERT_MACHINE, row)
            self._connection.execute(_INSERT, row)

    def measurements(self, workload: str | None = None) -> list[Measurement]:
        """All measurements, oldest first; of the same (cell, repeat) only the latest.

        ``workload`` keeps those of one written form (``conv2d:size=50``), or of a name with
        all its parameters (``conv2d``).
        """
        if workload is None:
            return self._select(f"{_SELECT} WHERE {_LATEST} ORDER BY number", {})
        condition = f"{_LATEST} AND {_OF_WORKLOAD}"
        return self._select(f"{_SELECT} WHERE {condition} ORDER BY number", {"workload": workload})

    def find(self, cell: str, repeat: int) -> Measurement | None:
        """The latest measurement of a cell's repeat, or None."""
        condition = "cell = :cell AND repeat = :repeat ORDER BY number DESC LIMIT 1"
        found = self._select(f"{_SELECT} WHERE {condition}", {"cell": cell, "repeat": repeat})
        return found[0] if found else None

    def close(self) -> None:
        """Close the file; the last one to close folds the write-ahead log into it."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _select(self, query: str, named: dict[str, str | int]) -> list[Measurement]:
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
                "next: use the nfold that wrote it, or another --results folder"
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
