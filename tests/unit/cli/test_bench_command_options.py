"""``nfold bench`` in this process on the simulated framework: exit codes, streams, screens."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from made import machine
from nfold import cli
from nfold.cli import bench_command, options
from nfold.fieldreports import catalog
from nfold.fieldreports.catalog import FieldReportSpec, ReportGrid
from nfold.store.store import Store

SHORT = ("--framework", "simulated", "--steps", "20")


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of two cores, and no script but the test's own."""
    monkeypatch.setattr(bench_command, "inspect_machine", lambda: machine(cores=2))
    monkeypatch.delenv("NFOLD_SIMULATED", raising=False)


@dataclasses.dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.out)
        return found


class Command:
    """``nfold`` with its results in one folder."""

    def __init__(
        self, results: Path, capsys: pytest.CaptureFixture[str], patch: pytest.MonkeyPatch
    ) -> None:
        self.results, self._capsys, self._patch = results, capsys, patch

    def nfold(self, *arguments: str) -> Done:
        self._patch.setattr(sys, "argv", ["nfold", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = self._capsys.readouterr()
        assert ended.value.code is None or isinstance(ended.value.code, int)
        return Done(ended.value.code or 0, out, err)

    def bench(self, *arguments: str, workload: str = "cnn10", report: bool = False) -> Done:
        where = ["--results", str(self.results), *([] if report else ["--no-report"])]
        return self.nfold("bench", workload, *arguments, *where)

    def plant(self, **script: Any) -> None:
        self._patch.setenv("NFOLD_SIMULATED", json.dumps(script))


@pytest.fixture
def command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Command:
    return Command(tmp_path / "results", capsys, monkeypatch)


def test_tables_go_to_stdout_and_progress_to_stderr_without_escape_codes(command: Command) -> None:
    done = command.bench(*SHORT, "--devices", "1,2", "--batch", "100")
    assert done.code == 0
    assert "2.00×" in done.out
    cells = {line.partition("] ")[2].split(":")[0] for line in done.err.splitlines()}
    assert cells == {"cnn10 · 1 device", "cnn10 · 2 devices"}
    assert "\x1b" not in done.out + done.err


def test_json_is_one_object_and_nothing_else(command: Command) -> None:
    done = command.bench(*SHORT, "--devices", "1,2", "--batch", "100", "--json", report=True)
    assert done.document["schema"] == 1
    assert [m["plan"]["devices"] for m in done.document["measurements"]] == [1, 2]
    (comparison,) = done.document["comparisons"]
    assert comparison["speedup"]["value"] == pytest.approx(2.0)
    assert (command.results / "report.html").exists()


def test_a_rerun_measures_only_what_is_missing(command: Command) -> None:
    first = command.bench(*SHORT, "--batch", "100", "--json").document
    second = command.bench(*SHORT, "--batch", "100,200", "--json")
    assert second.err.count("\n") == 1
    ids = [m["id"] for m in second.document["measurements"]]
    assert ids[0] == first["measurements"][0]["id"]
    assert len(ids) == 2
    third = command.bench(*SHORT, "--batch", "100,200")
    assert third.err == ""
    assert "2 measured before (--again measures them again)" in third.out
    assert command.bench(*SHORT, "--batch", "100,200", "--again").err.count("\n") == 2


@pytest.mark.parametrize(
    ("kind", "code"),
    [("oom", 0), ("crash", 1), ("hang", 1), ("kill", 1), ("diverged", 1)],
)
def test_a_failed_run_exits_1_and_a_result_exits_0(command: Command, kind: str, code: int) -> None:
    command.plant(failures=[{"kind": kind, "devices": 2, "step": 3}])
    done = command.bench(*SHORT, "--devices", "1,2", "--json")
    assert done.code == code
    first, second = done.document["measurements"]
    assert first["status"] == "ok"
    assert second["cause"]["step"] == 3


def test_what_cannot_run_is_a_row_with_its_reason(command: Command) -> None:
    command.plant(unsupported={"step": ["captured"]})
    done = command.bench(*SHORT, "--step", "eager,captured")
    assert done.code == 0
    assert "step 'captured' is planted as unsupported" in done.out


def test_merged_combinations_are_said(command: Command) -> None:
    done = command.bench(*SHORT, "--devices", "1,2", "--strategy", "ddp,dp")
    assert "3 cells; 1 more are the same on one device" in done.out


def test_repeats_are_named(command: Command) -> None:
    done = command.bench(*SHORT, "--repeat", "2")
    assert "cnn10 · repeat 2:" in done.err


def test_a_dry_run_runs_nothing(command: Command) -> None:
    done = command.bench("--devices", "1,2", "--batch", "128,256", "--dry-run")
    assert done.code == 0
    assert done.out.count("cnn10 · ") == 4
    assert "rough: assumes 20 GFLOP/s a core" in done.out
    with Store.open(command.results) as store:
        assert store.measurements() == []


def test_a_dry_run_in_json_is_one_object(command: Command) -> None:
    found = command.bench("--devices", "1,2", "--dry-run", "--json").document
    assert found["schema"] == 1
    assert [turn["plan"]["devices"] for turn in found["planned"]] in ([1, 2], [2, 1])
    total = sum(turn["estimated_seconds"] for turn in found["planned"])
    assert found["estimated_seconds"] == pytest.approx(total)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--precision", "bf61"), 2, "unknown precision 'bf61': allowed are bf16"),
        (("--batch", "0"), 2, "batch '0': allowed are whole numbers from 1"),
        (("--parameter", "depth=3"), 2, "unknown parameter of cnn10 'depth'"),
        (("--scaling", "week"), 2, "unknown scaling 'week': allowed are weak"),
        (("--steps", "3", "--epochs", "2"), 2, "allowed is one of them"),
        (("--devices", "2", "--strategy", "single"), 2, "allowed are ddp, nfold, dp"),
        (("--hang-timeout", "0"), 2, "--hang-timeout 0.0: allowed are seconds above 0"),
        (("--telemetry-interval", "nan"), 2, "--telemetry-interval nan"),
        (("--device", "tpu"), 2, "unknown device 'tpu'"),
        (("--devices", "1,64"), 4, "64 cpu devices were requested"),
    ],
)
def test_errors_are_one_line_with_their_exit_code(
    command: Command, arguments: tuple[str, ...], code: int, said: str
) -> None:
    done = command.bench(*arguments)
    assert done.code == code
    assert done.out == ""
    assert done.err.startswith("nfold: error: ")
    assert said in done.err
    assert done.err.count("\n") == 1


def test_an_unknown_workload_names_the_closest_first(command: Command) -> None:
    done = command.bench(workload="cnn01")
    assert done.code == 2
    assert "unknown workload 'cnn01': allowed are cnn10" in done.err


def test_a_hostile_name_cannot_steer_the_terminal(command: Command) -> None:
    done = command.bench(workload="cnn10\x1b[2J\n")
    assert done.code == 2
    assert "\x1b" not in done.err


def test_missing_data_is_one_error_before_anything_runs(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NFOLD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path))
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.setenv("NFOLD_DATA", str(empty))
    done = command.bench("--devices", "1,2")
    assert done.code == 4
    assert "data set cifar10: missing" in done.err
    assert done.err.count("\n") == 1


def test_unknown_options_are_usage_errors(command: Command) -> None:
    done = command.bench("--batchs", "3")
    assert done.code == 2
    assert "--batch" in done.err


def test_an_internal_error_is_one_line_unless_debugged(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise KeyError("planted")

    monkeypatch.setattr(bench_command, "inspect_machine", broken)
    done = command.bench(*SHORT)
    assert done.code == 1
    assert (
        done.err
        == "nfold: internal error: KeyError: 'planted'; next: --debug shows the traceback\n"
    )
    monkeypatch.setattr(sys, "argv", ["nfold", "bench", "cnn10", "--debug"])
    with pytest.raises(KeyError):
        cli.main()


def test_a_further_rank_of_a_job_says_and_stores_nothing(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    done = command.bench(*SHORT, "--devices", "1,2")
    assert (done.code, done.out, done.err) == (0, "", "")
    assert not command.results.exists()


LONG = {"batch": "100,200", "framework": "simulated"}
PLANTED = FieldReportSpec(
    name="cifar-scaling",
    build=catalog.FIELD_REPORTS["cifar-scaling"].build,
    full=(ReportGrid(workload="cnn10", axes=LONG, epochs=2),),
    quick=(
        ReportGrid(workload="cnn10", axes=LONG, epochs=2),
        ReportGrid(workload="wide_resnet", axes={"framework": "simulated"}, epochs=2),
    ),
    repeats=2,
)


@pytest.fixture
def planted(command: Command, monkeypatch: pytest.MonkeyPatch) -> Command:
    """A field report on the virtual clock: 100 ms a step of 100, the exchange takes 20."""
    monkeypatch.setitem(catalog.FIELD_REPORTS, "cifar-scaling", PLANTED)
    command.plant(compute_ms_per_sample=1.0, exchange_ms=20.0, samples_per_epoch=1000)
    return command


def _report(command: Command, *arguments: str, name: str = "cifar-scaling") -> Done:
    where = ("--results", str(command.results))
    return command.nfold("bench", "--report", name, *arguments, *where)


def test_a_field_report_is_one_sweep_and_its_own_table(planted: Command) -> None:
    done = _report(planted, "--quick")
    assert done.code == 0
    assert done.err.count("\n") == 2 * (4 + 2)
    assert "then: PyTorch, dp" in done.out
    assert "now: simulated, ddp   1.00 / 1.00 / 2.00 s / 0.6750" in done.out
    assert "simulated, ddp: 2 devices are 1.43× one at batch 100 and 1.67× one" in done.out
    for kind in ("html", "md", "csv"):
        assert (planted.results / f"cifar-scaling.{kind}").exists()


def test_what_a_field_report_has_measured_is_not_measured_again(planted: Command) -> None:
    _report(planted, "--quick")
    done = _report(planted, "--repeat", "1", "--json")
    assert done.err == ""
    assert len(done.document["measurements"]) == 4
    (table, _) = done.document["report"]["tables"]
    (row,) = [r for r in table["rows"] if r["batch"] == 100 and r[""].startswith("now")]
    assert row["1 device"]["epoch_1_s"] == pytest.approx(1.0)
    assert row["2 devices"]["epoch_1_s"] == pytest.approx(0.7)


def test_the_store_gives_the_field_report_again(planted: Command) -> None:
    _report(planted, "--quick", "--no-report")
    where = ("--results", str(planted.results))
    done = planted.nfold("report", "--report", "cifar-scaling", *where)
    assert "now: simulated, ddp" in done.out
    assert (planted.results / "cifar-scaling.html").exists()
    told = planted.nfold("report", "--report", "cifar-scaling", "--json", *where).document
    assert told["report"]["name"] == "cifar-scaling"


def test_a_field_report_is_narrowed_by_devices_and_values(planted: Command) -> None:
    done = _report(planted, "--devices", "cpu:1", "--batch", "200", "--epochs", "1", "--json")
    measured = done.document["measurements"]
    assert [m["plan"]["batch"] for m in measured] == [200, 200]
    assert {m["plan"]["epochs"] for m in measured} == {1}
    assert {m["repeat"] for m in measured} == {0, 1}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["bench"], "neither of WORKLOAD and --report NAME"),
        (["bench", "digits", "--report", "layout"], "both of WORKLOAD and --report NAME"),
        (["bench", "digits", "--quick"], "--quick needs a field report"),
        (["bench", "--report", "layuot"], "allowed are layout, "),
        (
            ["bench", "--report", "layout", "--workers", "2"],
            "--workers cannot be used with --report",
        ),
        (["bench", "--report", "layout", "-p", "depth=10"], "--parameter cannot be used with"),
        (["bench", "--report", "layout", "--scaling", "weak"], "--scaling cannot be used with"),
        (["bench", "--report", "conv2d-devices", "--layout", "x"], "no axis 'layout'"),
        (["bench", "--report", "conv2d-devices", "--epochs", "2"], "has a length in epochs"),
        (["bench", "--report", "conv2d-devices", "--devices", "two"], "--devices two"),
    ],
)
def test_what_does_not_go_with_a_field_report_is_said(
    command: Command, arguments: list[str], text: str
) -> None:
    done = command.nfold(*arguments)
    assert done.code == 2
    assert text in done.err
    assert done.err.count("\n") == 1


WITHOUT_EXTRA = """
import sys
for library in ("altair", "jinja2", "markupsafe", "vl_convert"):
    sys.modules[library] = None
from nfold import cli
cli.main()
"""


def test_without_the_extra_the_report_is_markdown_and_says_what_to_install(tmp_path: Path) -> None:
    bench_there = ["bench", "cnn10", *SHORT, "--results", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_EXTRA, *bench_there],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "pip install 'nfold[report]'" in done.stderr
    assert f"report: {tmp_path / 'report.md'}" in done.stdout
    assert (tmp_path / "report.md").exists()


def test_the_request_has_every_option() -> None:
    fields = {field.name for field in dataclasses.fields(bench_command.BenchOptions)}
    assert set(options.BENCH_OPTIONS) == fields


def test_the_version_is_printed(command: Command) -> None:
    assert command.nfold("--version").out.startswith("nfold ")
