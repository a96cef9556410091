"""What the commands print: one golden file per screen, and tables on narrow screens."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner, Result

import measured
import measured_grids
from goldens import check_golden
from made import machine
from nfold import cli
from nfold.analysis.sections import group_sections
from nfold.bench.grid import build_grids, parse_axes
from nfold.bench.sweep import estimate_duration, schedule_sweep
from nfold.cli import bench_command, env_command, report_command
from nfold.cli.app import app
from nfold.cli.render import TextTable, print_table
from nfold.cli.train_command import TrainRequest, summary_lines
from nfold.core.measurement import Measurement
from nfold.core.plan import Plan
from nfold.core.workload import Workload
from nfold.fieldreports.catalog import build_field_report
from nfold.report.export import measurements_document, report_markdown
from nfold.telemetry.obstacles import Obstacle

CONSTRAINTS = Path(__file__).parents[3] / "constraints.txt"
WIDTHS = (60, 80, 100)
NUMBER = re.compile(r"\d[\d,.]*")


def screen(width: int) -> Console:
    return Console(file=io.StringIO(), width=width, markup=False, highlight=False)


def text_of(console: Console) -> str:
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def tables(measurements: list[Measurement], width: int, field: str | None = None) -> str:
    console = screen(width)
    report = build_field_report(field, measurements) if field else None
    report_command.print_sections(group_sections(measurements), console, report)
    return text_of(console)


GRIDS = {
    "training": measured_grids.training_grid,
    "cpu": measured_grids.cpu_grid,
    "operation": measured_grids.operation_grid,
}


@pytest.mark.skipif(
    f"typer=={typer.__version__}" not in CONSTRAINTS.read_text().split(),
    reason="Typer formats help in another way in other versions",
)
@pytest.mark.parametrize("command", ["", "env", "bench", "train", "run", "explain", "report"])
def test_help(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    done = CliRunner().invoke(app, [*command.split(), "--help"], prog_name="nfold")
    assert max(map(len, done.output.splitlines())) <= 100
    check_golden(f"help{'-' if command else ''}{command}.txt", done.output)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("width", WIDTHS)
def test_tables(grid: str, width: int) -> None:
    shown = tables(GRIDS[grid](), width)
    assert max(map(len, shown.splitlines())) <= width
    check_golden(f"bench-{grid}-{width}.txt", shown)


@pytest.mark.parametrize("width", WIDTHS)
def test_field_report(width: int) -> None:
    shown = tables(measured_grids.operation_grid(), width, "conv2d-devices")
    assert max(map(len, shown.splitlines())) <= width
    check_golden(f"field-report-{width}.txt", shown)


@pytest.mark.parametrize("width", [10, 20, 40, 60, 80, 100])
def test_no_number_is_cropped(width: int) -> None:
    rows = [[f"cell {k}", f"{10**k:,} ±{k}.25", "out of memory¹", str(k)] for k in range(7)]
    heads = ["name of a cell", "images/s", "a status", "n"]
    console = screen(width)
    print_table(console, TextTable(heads=heads, rows=rows))
    shown = " ".join(text_of(console).split())
    dropped = [head for head in heads if f" {head}" in shown.partition("Not shown at")[2]]
    for row in rows:
        kept = [cell for head, cell in zip(heads, row, strict=True) if head not in dropped]
        for number in NUMBER.findall(" ".join(kept)):
            assert number in shown
    assert "…" not in shown


def test_the_lightest_columns_are_dropped_first_and_named() -> None:
    table = TextTable(heads=["a", "b", "c"], rows=[["1" * 20] * 3], weights=[10, 2, 3])
    console = screen(45)
    print_table(console, table)
    assert "Not shown at 45 columns: b;" in text_of(console)


@pytest.mark.parametrize("width", [60, 100])
def test_env(width: int) -> None:
    console = screen(width)
    found = [
        Obstacle("Another process uses GPU 0: it takes 31 % of its time", "NVML, process 4711"),
        Obstacle("/dev/shm has 64 MiB; loader workers need more", "statvfs of /dev/shm"),
    ]
    env_command.print_machine(measured.gpu_machine(), found, console)
    assert len(text_of(console).splitlines()) <= 25 + 15 * (width < 100)
    check_golden(f"env-{width}.txt", text_of(console))


def test_env_without_obstacle() -> None:
    console = screen(80)
    env_command.print_machine(measured.cpu_machine(), [], console)
    check_golden("env-cpu.txt", text_of(console))


def test_train(monkeypatch: pytest.MonkeyPatch) -> None:
    measurement = measured.measurement(
        measured.cpu_machine(), workload="digits", epochs=3, batch=64, cores_per_device=1
    )
    request = TrainRequest(
        workload=measurement.workload,
        plan=measurement.plan,
        machine=measurement.machine,
        checkpoint_folder=None,
        checkpoint_every=1,
    )
    monkeypatch.setattr(TrainRequest, "newest_checkpoint", Path("checkpoints/run-1/epoch-3"))
    check_golden("train.txt", "\n".join(summary_lines(request, measurement)))


def test_report_markdown() -> None:
    found = [*measured_grids.cpu_grid(), *measured_grids.operation_grid((1, 2))]
    check_golden("report.md", report_markdown(group_sections(found)))


def test_report_json_keys() -> None:
    def keys(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: keys(item) for key, item in value.items()}
        return [keys(value[0])] if isinstance(value, list) and value else None

    document = measurements_document(measured_grids.cpu_grid())
    document["machines"] = {"ID": next(iter(document["machines"].values()))}
    check_golden("report-keys.json", json.dumps(keys(document), indent=1))


def test_dry_run(capsys: pytest.CaptureFixture[str]) -> None:
    host = machine(cores=2)
    axes = parse_axes("digits", {"devices": "1,2", "batch": "64,128"}, common=Plan(epochs=2))
    grid = build_grids([axes], host, lambda *_: None)
    runs = schedule_sweep(grid, bench_command.NonWritingStore())
    estimates = [estimate_duration(run.cell, []) for run in runs.pending]
    bench_command.print_sweep_plan(grid, runs, estimates, as_json=False)
    check_golden("bench-dry-run.txt", capsys.readouterr().out)


@pytest.fixture
def results(tmp_path: Path) -> Path:
    measured_grids.write_store(tmp_path, measured_grids.cpu_grid())
    return tmp_path


def report(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


@pytest.mark.parametrize(
    ("form", "begin"), [("csv", "workload,machine,"), ("md", "## digits"), ("html", "<!doctype")]
)
def test_a_file_named_minus_is_standard_output(
    results: Path, monkeypatch: pytest.MonkeyPatch, form: str, begin: str
) -> None:
    monkeypatch.chdir(results)
    done = report("--results", results, f"--{form}", "-")
    assert done.exit_code == 0
    assert done.stdout.startswith(begin)
    assert not (results / "-").exists()


def test_two_forms_cannot_be_standard_output(results: Path) -> None:
    done = report("--results", results, "--md", "-", "--json")
    assert getattr(done.exception, "exit_code", None) == 2


@pytest.fixture
def _no_report_extra(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delitem(sys.modules, "nfold.report.html_page", raising=False)
    monkeypatch.delattr("nfold.report.html_page", raising=False)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    yield
    sys.modules.pop("nfold.report.html_page", None)


@pytest.mark.usefixtures("_no_report_extra")
def test_without_the_extra_only_an_explicit_page_fails(results: Path) -> None:
    done = report("--results", results)
    assert done.exit_code == 0
    assert "2 devices are" in done.stdout
    assert "nfold[report]" in done.stderr
    named = report("--results", results, "--html", results / "a.html")
    assert getattr(named.exception, "exit_code", None) == 4


def run_main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["nfold", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.mark.parametrize(
    ("arguments", "next_step"),
    [
        (["bench", "slow.py"], "nfold explain slow.py"),
        (["train", "slow.py"], "nfold explain slow.py"),
        (["explain", "slow"], "nfold explain slow.py"),
    ],
)
def test_a_script_is_sent_to_explain(
    arguments: list[str],
    next_step: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "slow.py").write_text("pass\n")
    assert run_main(monkeypatch, *arguments) == 2
    assert next_step in capsys.readouterr().err


@pytest.mark.parametrize("devices", ["0", "tpu:2", "two", "cpu:", "gpu:x", "-1"])
def test_devices_have_the_same_error_in_every_command(
    devices: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.py").write_text("pass\n")
    commands = (["bench", "digits"], ["train", "digits"], ["explain", "digits"], ["run"])
    errors = set()
    for command in commands:
        script = ["a.py"] if command == ["run"] else []
        assert run_main(monkeypatch, *command, f"--devices={devices}", *script) == 2
        errors.add(capsys.readouterr().err)
    assert len(errors) == 1
    assert f"--devices {devices}: allowed are" in errors.pop()


@pytest.mark.parametrize("text", ["gpu:2", "cuda:2"])
def test_gpu_and_cuda_are_the_same_device_type(text: str) -> None:
    axes = parse_axes(str(Workload.parse("digits")), {"devices": text}, common=Plan())
    assert axes.changes["devices"] == ({"device": "cuda", "devices": 2},)
