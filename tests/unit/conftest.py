from __future__ import annotations

from pathlib import Path

import pytest

import measured_grids


@pytest.fixture(scope="session")
def training(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A results folder with a grid on GPUs: batches, layouts, strategies, failures, telemetry."""
    results = tmp_path_factory.mktemp("training")
    measured_grids.write_store(results, measured_grids.training_grid())
    return results


@pytest.fixture(scope="session")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two machines and three workloads in one store: an operation, and repeats on a CPU."""
    results = tmp_path_factory.mktemp("mixed")
    made = [
        *measured_grids.operation_grid(),
        *measured_grids.cpu_grid(),
        *measured_grids.cpu_grid("mnist")[:2],
    ]
    measured_grids.write_store(results, made)
    return results
