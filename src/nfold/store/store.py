"""The store of measurements.

Every append is one transaction that is on the disk when the call returns: write-ahead log with
``synchronous=FULL`` (SQLite, PRAGMA synchronous), or a rollback journal.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Mapping
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
