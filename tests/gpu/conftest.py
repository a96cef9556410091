"""Selects a part of the GPU tests if several run in parallel: see ``tools/gpu_tests.py``."""

from __future__ import annotations

import os

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of NFOLD_SHARD=K/N, every N-th test from the K-th on."""
    part, _, parts = os.environ.get("NFOLD_SHARD", "").partition("/")
    if not parts:
        return
    kept = items[int(part) :: int(parts)]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept
