from __future__ import annotations

import shutil
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import measured
from nfold.core.errors import StoreUnusable
from nfold.store import store as database
from nfold.store.store import DATABASE_FILE, Store


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with Store.open(tmp_path) as store:
        store.append(measured.measurement())
    return tmp_path / DATABASE_FILE


def pragma(store: Store, name: str) -> Any:
    return store._connection.execute(f"PRAGMA {name}").fetchone()[0]


def test_commits_are_durable_and_the_version_is_written(tmp_path: Path) -> None:
    with Store.open(tmp_path) as store:
        assert pragma(store, "journal_mode") == "wal"
        assert pragma(store, "synchronous") == 2  # FULL
        assert pragma(store, "user_version") == 1


def set_version(path: Path, version: int) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA user_version = {version}")


@pytest.mark.parametrize("open_store", [Store.open, Store.open_readonly])
def test_a_newer_store_is_refused_and_left_as_it_is(path: Path, open_store: Any) -> None:
    set_version(path, 7)
    before = path.read_bytes()
    with pytest.raises(StoreUnusable, match=r"schema version 7.* up to 1; next: pip install"):
        open_store(path.parent)
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == [DATABASE_FILE]


def test_a_newer_version_that_is_only_in_the_log_is_refused_too(path: Path) -> None:
    other = sqlite3.connect(path)
    with closing(other):
        other.execute("PRAGMA user_version = 9")
        log = Path(f"{path}-wal")
        before = (path.read_bytes(), log.read_bytes())
        with pytest.raises(StoreUnusable, match="schema version 9"):
            Store.open(path.parent)
        assert (path.read_bytes(), log.read_bytes()) == before


def test_other_files_are_refused_and_unchanged(tmp_path: Path) -> None:
    path = tmp_path / DATABASE_FILE
    path.write_text("not a database, " * 100)
    before = path.read_bytes()
    with pytest.raises(StoreUnusable, match="is not a store; next: move it away"):
        Store.open(tmp_path)
    assert path.read_bytes() == before


def test_another_programs_database_is_refused(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / DATABASE_FILE)) as connection:
        connection.execute("CREATE TABLE songs (title TEXT)")
    with pytest.raises(StoreUnusable, match="another program's database"):
        Store.open(tmp_path)


def test_a_folder_in_the_files_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / DATABASE_FILE).mkdir()
    with pytest.raises(StoreUnusable, match="next: choose another --results folder"):
        Store.open(tmp_path)


def test_a_results_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreUnusable, match="next: choose another --results folder"):
        Store.open(tmp_path / "file" / "results")


def test_a_full_disk_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = SimpleNamespace(total=2**30, used=2**30, free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    with pytest.raises(StoreUnusable, match=r"0\.0 MiB are free .* 4 MiB are needed; next: make"):
        Store.open(tmp_path)
    assert not (tmp_path / DATABASE_FILE).exists()


def test_a_disk_that_fills_up_refuses_the_row_and_keeps_the_others(path: Path) -> None:
    with Store.open(path.parent) as store:
        pages = pragma(store, "page_count")
        store._connection.execute(f"PRAGMA max_page_count = {pages}")
        with pytest.raises(StoreUnusable, match="full disk; next: make room"):
            store.append(measured.measurement(name="large", devices=4, batch=512))
        assert len(store.measurements()) == 1


class NoSharedMemory(sqlite3.Connection):
    """A database on a file system without shared memory: asking for a log changes nothing."""

    def execute(self, sql: str, *more: Any) -> sqlite3.Cursor:
        if sql == "PRAGMA journal_mode = WAL":
            return super().execute("PRAGMA journal_mode")
        return super().execute(sql, *more)


def test_without_a_log_a_rollback_journal_keeps_rows_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = sqlite3.connect

    def without_shared_memory(*args: Any, **more: Any) -> sqlite3.Connection:
        return connect(*args, factory=NoSharedMemory, **more)

    monkeypatch.setattr(sqlite3, "connect", without_shared_memory)
    made = measured.measurement()
    with Store.open(tmp_path) as store:
        store.append(made)
        assert pragma(store, "journal_mode") == "delete"
        assert pragma(store, "synchronous") == 2
        assert store.measurements() == [made]


@pytest.fixture
def locked(path: Path) -> Iterator[sqlite3.Connection]:
    other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    yield other
    other.close()


def test_a_second_writer_waits_for_the_first(path: Path, locked: sqlite3.Connection) -> None:
    appended = threading.Event()

    def append() -> None:
        with Store.open(path.parent) as store:
            store.append(measured.measurement(name="second"))
        appended.set()

    writer = threading.Thread(target=append)
    writer.start()
    assert not appended.wait(0.3)
    locked.execute("COMMIT")
    writer.join(timeout=30)
    assert appended.is_set()


def test_many_may_make_the_same_store_at_the_same_moment(tmp_path: Path) -> None:
    failures: list[Exception] = []

    def append(results: Path, number: int, together: threading.Barrier) -> None:
        together.wait()
        try:
            with Store.open(results) as store:
                store.append(measured.measurement(repeat=number))
        except StoreUnusable as error:
            failures.append(error)

    for turn in range(10):
        together = threading.Barrier(4)
        results = tmp_path / str(turn)
        writers = [threading.Thread(target=append, args=(results, k, together)) for k in range(4)]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join()
        with Store.open_readonly(results) as store:
            assert len(store.measurements()) == 4 - len(failures)
    assert failures == []


def test_a_busy_store_is_reported(
    path: Path, locked: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "BUSY_TIMEOUT_S", 0.1)
    with pytest.raises(StoreUnusable, match=r"held by another process for .* next: wait"):
        Store.open(path.parent)
