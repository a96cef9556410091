"""The field reports' own tables, from measurements made by hand or by the simulated framework."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import measured
import measured_grids
from nfold.analysis import sections as sections_module
from nfold.core.errors import UnknownValue
from nfold.core.measurement import FailureCause, Measurement
from nfold.core.serialization import serialize
from nfold.fieldreports.catalog import FIELD_REPORTS, build_field_report
from nfold.fieldreports.sheets import FieldReport, Sheet
from nfold.report.export import report_markdown
from nfold.report.html_page import report_page


def _row(sheet: Sheet, *begin: str) -> list[str]:
    """The one row that begins with these texts."""
    (found,) = [row for row in sheet.texts if row[: len(begin)] == list(begin)]
    return found


def _steady(
    rate: float, *, workload: str = "cnn10", gpus: int | None = None, **more: Any
) -> Measurement:
    """Without noise; on GPUs where their number is given, else on two cores."""
    host = measured.gpu_machine(gpus) if gpus else measured.cpu_machine()
    shares = {} if gpus else {"cores_per_device": 1}
    return measured.measurement(host, workload=workload, rate=rate, noise=0.0, **{**shares, **more})


def test_an_unknown_report_is_refused_with_the_names() -> None:
    with pytest.raises(UnknownValue, match="conv2d-devices"):
        build_field_report("conv2d", [])


@pytest.mark.parametrize("name", FIELD_REPORTS)
def test_without_a_measurement_only_the_numbers_of_then_are_left(name: str) -> None:
    made = build_field_report(name, [])
    assert made.sheets
    assert made.sheets[0].rows
    assert not any("now:" in text for sheet in made.sheets for row in sheet.texts for text in row)
    json.dumps(made.to_json(), allow_nan=False)


def test_conv2d_has_every_part_by_devices_beside_the_cards_of_then() -> None:
    made = build_field_report("conv2d-devices", measured_grids.operation_grid())
    whole, cpu, problems = made.sheets
    assert whole.heads == ("devices", *map(str, range(1, 9)))
    assert _row(whole, "then: V100, one call")[1:3] == ["14,898", "4,328"]
    one, _, three = _row(whole, "now: first call")[1:4]
    assert float(one) == pytest.approx(890, rel=0.1)
    assert three == "–"
    assert _row(cpu, "scipy.signal.convolve2d, 1 core")[1] == "222"
    assert _row(cpu, "scipy.ndimage.convolve, 1 core")[1] == "–"
    assert _row(problems, "3", "1", "840", "end to end")[-1].endswith("×")
    said = " ".join(made.sentences)
    assert "a single timed call mostly measures the start" in said
    assert "4 devices are" in said


def test_conv2d_says_nothing_of_the_start_where_it_takes_no_time() -> None:
    parts = (
        measured.part("first call", 101.0),
        measured.part("copy only", 10.0),
        measured.part("end to end", 100.0),
    )
    one = measured_grids.operation_grid([1])[0].to_dict()
    one["ranks"][0]["parts"] = [serialize(part) for part in parts]
    made = build_field_report("conv2d-devices", [Measurement.from_dict(one)])
    said = " ".join(made.sentences)
    assert "measures the start" not in said
    assert "10 % on 1 device" in said


def test_conv2d_keeps_other_frameworks_in_a_table_of_their_own() -> None:
    torch = measured_grids.operation_grid([1, 2])
    (other,) = (one.to_dict() for one in measured_grids.operation_grid([1]))
    other["plan"]["framework"] = "jax"
    other["ranks"][0]["parts"] = [serialize(measured.part("end to end, pageable", 0.01))]
    smaller = {**other, "plan": {**other["plan"], "framework": "tensorflow", "batch": 84}}
    failed = torch[0].to_dict() | {"status": "crashed", "cause": {"text": "no GPU"}, "ranks": []}
    failed["plan"] = {**failed["plan"], "framework": "tensorflow"}
    others = [Measurement.from_dict(one) for one in (other, failed, smaller)]
    alone = build_field_report("conv2d-devices", torch)
    made = build_field_report("conv2d-devices", [*torch, *others])
    assert [sheet.texts for sheet in made.sheets[:3]] == [s.texts for s in alone.sheets]
    *_, sheet = made.sheets
    assert sheet.heads == ("framework", "part", "1 device [ms]", "2 devices [ms]")
    assert _row(sheet, "jax", "end to end, pageable")[2].startswith("0.0")
    (row,) = (row for row in sheet.texts if row[0] == "tensorflow")
    assert "crashed" in row[2]
    assert "ms in jax" in made.sentences[-1]
    assert made.sentences[:-1] == alone.sentences


def test_mnist_compares_frameworks_by_batch_and_counts_steps() -> None:
    found = [
        _steady(100.0, workload="mnist", batch=100, epochs=2),
        _steady(150.0, workload="mnist", batch=100, epochs=2, devices=2),
        _steady(180.0, workload="mnist", batch=200, epochs=2, devices=2),
    ]
    made = build_field_report("mirrored-mnist", found)
    (sheet,) = made.sheets
    assert _row(sheet, "then: TensorFlow 1", "2")[2:7] == [
        "100 (50)",
        "0.9515",
        "90.6 s",
        "10,000",
        "9.06",
    ]
    assert _row(sheet, "now: torch", "2", "200 (100)")[5] == "500"
    assert made.sentences[0] == (
        "torch: 2 devices give a speedup of 1.50× at 50 per device (same global batch) and "
        "1.80× at 100 per device (same batch per device)."
    )
    assert made.sentences[1].startswith("The 2 accuracies after 1,000 steps of 100 lie within")


def test_inception_sets_the_places_of_the_distortion_against_each_other() -> None:
    found = [
        _steady(rate, workload="inception_v3", gpus=2, batch=32, steps=40, input="loader", **place)
        for rate, place in (
            (40.0, {"augment": "cpu", "devices": 1}),
            (44.0, {"augment": "cpu", "devices": 2}),
            (80.0, {"augment": "device", "devices": 1}),
            (160.0, {"augment": "device", "devices": 2}),
        )
    ]
    made = build_field_report("inception-input", found)
    (sheet,) = made.sheets
    assert _row(sheet, "then: distortion on cpu")[2:] == ["44.6–45.2, 0.71", "38.8–42.3, 0.77–0.82"]
    assert _row(sheet, "now: distortion on cpu")[2:] == ["40.0, 0.800", "44.0, 0.727"]
    said = " ".join(made.sentences)
    assert "distortion on device, batch 32, 2 devices: 3.64×" in said
    assert "The slowest on 2 devices, distortion on cpu: 1.10× one device." in said
    assert "The fastest on 2 devices, distortion on device: 2.00× one device." in said


def test_cifar_says_from_which_batch_on_devices_win() -> None:
    found = []
    for batch, gain in ((128, 0.76), (512, 1.4), (2048, 1.9)):
        found.append(_steady(1000.0, gpus=2, batch=batch, epochs=3, step="eager"))
        found.append(
            _steady(
                1000.0 * gain, gpus=2, batch=batch, epochs=3, devices=2, strategy="dp", step="eager"
            )
        )
    made = build_field_report("cifar-scaling", found)
    cnn, wrn = made.sheets
    assert _row(cnn, "128", "then: PyTorch, dp")[2:] == [
        "15.9 / 13.9 / 0:23:15 / 0.8915",
        "16.1 / 11.9 / 0:20:04 / 0.8896",
    ]
    assert _row(cnn, "128", "now: torch, dp")[2].startswith("54.0 / 50.0 / 0:02:34 / 0.6")
    assert _row(wrn, "512", "then: PyTorch, dp")[2] == "out of memory"
    assert made.sentences[0].endswith("after 3 epochs now, 100 then.")
    assert made.sentences[1] == (
        "cnn10, torch, dp: 2 devices are 0.76× one at batch 128 and 1.90× one at batch 2,048; "
        "significantly faster from batch 512 on."
    )


def test_what_failed_stands_in_its_place_with_the_reason() -> None:
    full = FailureCause(text="CUDA out of memory: 2 GiB were asked for", rank=0)
    found = [
        _steady(1.0, gpus=2, batch=128, epochs=3, status="oom", cause=full, ranks=()),
        _steady(1000.0, gpus=2, batch=128, epochs=3, devices=2, strategy="nfold"),
    ]
    made = build_field_report("cifar-scaling", found)
    row = _row(made.sheets[0], "128", "now: torch, nfold")
    assert row[2] == "out of memory¹"
    assert made.sheets[0].notes == ("¹ rank 0: CUDA out of memory: 2 GiB were asked for",)
    (told,) = [row for row in made.to_json()["tables"][0]["rows"] if row[""] == "now: torch, nfold"]
    assert told["1 device"]["status"] == "oom"
    assert told["2 devices"]["epoch_1_s"] == pytest.approx(54.0)


def _layouts(first: float, last: float, repeats: int = 3) -> list[Measurement]:
    """Both layouts in every repeat; the machine is slower in each repeat than before."""
    return [
        _steady(rate / (1 + repeat), batch=64, steps=40, layout=layout, repeat=repeat)
        for repeat in range(repeats)
        for layout, rate in (("channels_first", first), ("channels_last", last))
    ]


def test_layouts_are_compared_repeat_by_repeat_so_that_drift_cancels() -> None:
    made = build_field_report("layout", _layouts(110.0, 100.0))
    (sheet,) = made.sheets
    assert _row(sheet, "cnn10", "then: TensorFlow/Keras")[-1] == "a little under 1.10"
    assert _row(sheet, "cnn10", "now: torch")[-1] == "1.10× ±0.00"
    assert made.sentences[0] == (
        "Of 1 pair channels_last is faster in 0, channels_first in 1; 0 are within the noise."
    )


def test_a_layout_that_cannot_run_is_a_row_with_its_reason() -> None:
    cause = FailureCause(text="NHWC alone on a CPU")
    refused: dict[str, Any] = {"status": "unsupported", "cause": cause, "ranks": ()}
    found = [
        _steady(100.0, batch=64, steps=40, layout="channels_last"),
        _steady(1.0, batch=64, steps=40, layout="channels_first", **refused),
    ]
    made = build_field_report("layout", found)
    row = _row(made.sheets[0], "cnn10", "now: torch")
    assert row[5:] == ["unsupported¹", "100 ±0", "–"]
    assert made.sheets[0].notes == ("¹ NHWC alone on a CPU",)


def test_only_the_newest_machine_is_shown() -> None:
    found = [_steady(100.0, gpus=2, batch=128, epochs=2), _steady(50.0, batch=256, epochs=2)]
    made = build_field_report("cifar-scaling", found)
    assert [row[:2] for row in made.sheets[0].texts if row[1].startswith("now")] == [
        ["256", "now: torch"]
    ]


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A results folder with a grid on GPUs."""
    results = tmp_path_factory.mktemp("training")
    measured_grids.write_store(results, measured_grids.training_grid())
    return results


@pytest.fixture(scope="module")
def shown(training: Path) -> tuple[str, str, FieldReport]:
    """The page and the Markdown of a grid on GPUs."""
    found = sections_module.load_measurements(training)
    made = build_field_report("cifar-scaling", found)
    sections = sections_module.group_sections(found)
    return report_page(sections, training, None, made), report_markdown(sections, made), made


@pytest.mark.slow(parts=8)
def test_the_page_has_the_tables_the_sentences_and_the_loads_of_every_run(
    shown: tuple[str, str, FieldReport], training: Path
) -> None:
    text, _, made = shown
    assert "<script" not in text
    assert "Load of the devices and of the host" in text
    runs = sum(
        len(section.results)
        for section in sections_module.group_sections(sections_module.load_measurements(training))
    )
    loads = text.partition('<section id="s1">')[0].count("<figure")
    assert loads == min(24, runs)
    assert made.sentences[0] in text
    assert "15.9 / 13.9 / 0:23:15 / 0.8915" in text


def test_the_markdown_has_the_tables_before_those_of_the_cells(
    shown: tuple[str, str, FieldReport],
) -> None:
    _, text, made = shown
    assert text.startswith(f"# {made.title}\n\n**")
    assert text.index("then: PyTorch, dp") < text.index("## cnn10 on")
