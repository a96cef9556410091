"""Real training on CPU devices: one and two agree, and what is measured is complete."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from made import plan
from nfold.core.machine import Machine
from nfold.core.measurement import Measurement
from nfold.core.workload import Workload
from nfold.launch.workload_run import run
from nfold.telemetry.machine_inspection import inspect_machine
from nfold.telemetry.telemetry_csv import read_rows
from warm_runs import warm_options

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def host() -> Machine:
    return inspect_machine()


def _train(host: Machine, results: Path, **changes: object) -> Measurement:
    requested = plan(host, **{"batch": 64, "cores_per_device": 1, **changes})
    options = warm_options(results, telemetry_interval_s=0.2)
    return run(Workload.parse("digits"), requested, machine=host, options=options)


@pytest.fixture(scope="module")
def both(host: Machine, tmp_path_factory: pytest.TempPathFactory) -> list[Measurement]:
    results = tmp_path_factory.mktemp("results")
    return [_train(host, results, devices=n, epochs=3) for n in (1, 2)]


def test_both_are_ok_and_learn(both: list[Measurement]) -> None:
    for done in both:
        assert done.status == "ok", done.cause
        epochs = done.ranks[0].epochs
        assert len(epochs) == 3
        assert epochs[0].train_loss is not None
        assert epochs[-1].train_loss is not None
        assert epochs[-1].train_loss < 0.6 * epochs[0].train_loss
        assert epochs[-1].accuracy is not None
        assert epochs[-1].accuracy > 0.8


def test_losses_do_not_depend_on_the_number_of_devices(both: list[Measurement]) -> None:
    """Sums in another order round differently, and training amplifies that step by step."""
    one, two = (done.ranks[0].epochs for done in both)
    for first, second, tolerance in zip(one, two, (2e-3, 1e-2, 5e-2), strict=True):
        assert second.train_loss == pytest.approx(first.train_loss, rel=tolerance)
        assert second.samples == first.samples == 1437


def test_every_sample_is_counted_once_over_the_ranks(both: list[Measurement]) -> None:
    one, two = (done.ranks for done in both)
    (count, whole), *_ = one[0].sample_hashes
    parts = [rank.sample_hashes[0] for rank in two]
    assert sum(part[0] for part in parts) == count == 1437
    assert sum(int(part[1], 16) for part in parts) % 2**64 == int(whole, 16)
    assert parts[0] != parts[1]


def test_ranks_end_with_the_same_parameters(both: list[Measurement]) -> None:
    first, second = both[1].ranks
    assert first.parameter_checksum == second.parameter_checksum
    assert first.parameter_count == both[0].ranks[0].parameter_count


def test_windows_exclude_the_first_step_and_the_warm_up(both: list[Measurement]) -> None:
    for done in both:
        for rank in done.ranks:
            assert rank.first_step_ms is not None
            steps = sum(window.steps for window in rank.windows)
            assert steps == 3 * 23 - rank.warmup_steps
            assert len(rank.step_ms) == steps
            assert rank.peak_memory_bytes is not None


def test_telemetry_is_stored_with_the_measurement(both: list[Measurement], host: Machine) -> None:
    del host
    for done in both:
        assert done.folder is not None
        assert done.energy_joules is None or done.energy_joules > 0


def test_a_run_in_steps_has_no_epochs_but_losses(host: Machine, tmp_path: Path) -> None:
    done = _train(host, tmp_path, devices=2, steps=30, warmup_steps=3)
    assert done.status == "ok", done.cause
    assert done.ranks[0].epochs == ()
    assert sum(window.steps for window in done.ranks[0].windows) == 30
    assert done.ranks[0].losses
    assert done.folder is not None
    written = read_rows(tmp_path / done.folder / "telemetry.csv")
    assert written
    assert any(row.get("rank1_cpu_percent") is not None for row in written)


@pytest.mark.slow
def test_a_batch_that_does_not_divide_trains_the_same(host: Machine, tmp_path: Path) -> None:
    one = _train(host, tmp_path, devices=1, batch=61, epochs=1)
    two = _train(host, tmp_path, devices=2, batch=61, epochs=1)
    losses = [done.ranks[0].epochs[0].train_loss for done in (one, two)]
    assert losses[1] == pytest.approx(losses[0], rel=2e-3)


@pytest.mark.slow
def test_our_own_exchange_trains_as_ddp_does(host: Machine, tmp_path: Path) -> None:
    """To the last bit: with two ranks there is one way to round a sum."""
    requested = {"devices": 2, "batch": 61, "epochs": 1}
    ddp, own = (_train(host, tmp_path, strategy=name, **requested) for name in ("ddp", "nfold"))
    assert own.status == "ok", own.cause
    assert {rank.parameter_checksum for rank in own.ranks} == {ddp.ranks[0].parameter_checksum}


@pytest.mark.slow
def test_a_compiled_step_has_the_losses_of_an_eager_one(host: Machine, tmp_path: Path) -> None:
    """On two devices in two pieces; the last batch of an epoch, of 29 samples, is not compiled."""
    fields = {"devices": 2, "strategy": "nfold", "batch": 128, "epochs": 2}
    eager = _train(host, tmp_path / "eager", step="eager", **fields)
    compiled = _train(host, tmp_path / "compiled", step="compiled", **fields)
    assert compiled.status == "ok", compiled.cause
    for first, second in zip(eager.ranks[0].epochs, compiled.ranks[0].epochs, strict=True):
        assert second.train_loss == pytest.approx(first.train_loss, rel=1e-2)
    assert len({rank.parameter_checksum for rank in compiled.ranks}) == 1


@pytest.mark.slow
def test_compressed_gradients_lose_little(host: Machine, tmp_path: Path) -> None:
    requested = {"devices": 2, "batch": 61, "epochs": 1, "strategy": "nfold"}
    whole, less = (_train(host, tmp_path, exchange=kind, **requested) for kind in ("fp32", "bf16"))
    assert less.ranks[0].parameter_checksum == less.ranks[1].parameter_checksum
    assert less.ranks[0].parameter_checksum != whole.ranks[0].parameter_checksum
    losses = [done.ranks[0].epochs[0].train_loss for done in (whole, less)]
    assert losses[1] == pytest.approx(losses[0], rel=5e-3)


@pytest.mark.slow(parts=8)
def test_a_single_rank_also_runs_in_the_parent_s_process(tmp_path: Path) -> None:
    """In a process of its own, since it claims cores and leaves torch loaded."""
    script = f"""
from pathlib import Path
from made import plan
from nfold.launch.launch_spec import RunOptions
from nfold.launch.workload_run import run
from nfold.telemetry.machine_inspection import inspect_machine
from nfold.core.workload import Workload
host = inspect_machine()
options = RunOptions(results=Path({str(tmp_path)!r}), in_process=True)
digits = Workload.parse("digits")
done = run(digits, plan(host, steps=5, warmup_steps=1), machine=host, options=options)
assert done.status == "ok", done.cause
refused = run(digits, plan(host, devices=2, steps=5), machine=host, options=options)
assert refused.status == "unsupported"
"""
    tests = Path(__file__).parent.parent
    subprocess.run([sys.executable, "-c", script], cwd=tests, check=True, timeout=120)
