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
