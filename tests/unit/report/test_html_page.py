from __future__ import annotations

import dataclasses
import hashlib
import re
from base64 import b64encode
from html.parser import HTMLParser
from pathlib import Path

import pytest

import measured
import measured_grids
from nfold.analysis import sections
from nfold.core.machine import Machine
from nfold.core.measurement import Caveat, FailureCause, Measurement
from nfold.report.html_page import machine_rows, report_page

HOSTILE = "</script><script>alert(1)</script>\x1b[31m ../../etc \n<img src=x onerror=alert(1)>"


class Elements(HTMLParser):
    """Every element of a page with its attributes, and the text outside of style."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.found if name == tag]


@pytest.fixture(scope="module")
def trained(training: Path) -> str:
    return report_page(sections.group_sections(sections.load_measurements(training)), training)


@pytest.fixture(scope="module")
def several(mixed: Path) -> str:
    return report_page(sections.group_sections(sections.load_measurements(mixed)), mixed)


def rendered(tmp_path: Path, *made: Measurement) -> str:
    return report_page(sections.group_sections(made), tmp_path)


def test_a_training_report_has_its_table_its_figures_and_its_telemetry(trained: str) -> None:
    elements = Elements(trained)
    assert len(elements.of("figure")) == 4 + 3
    for title in (
        "images/s over the global batch",
        "training time of 3 epochs [s] over the global batch",
        "speedup over devices",
        "training loss over samples seen",
        "load of the devices and of the host",
        "GPU utilisation [%]",
        "host CPU [%]",
        "GPU power [W]",
    ):
        assert title in elements.text
    assert "4 devices are 3." in elements.text
    assert "out of memory" in elements.text
    assert "CUDA out of memory: tried to allocate 2.25 GiB" in elements.text
    assert "GPU 2 was held back by its temperature" in elements.text
    assert "weak scaling" in elements.text


def test_every_workload_has_a_section_and_the_contents_lead_to_it(several: str) -> None:
    elements = Elements(several)
    ids = {attributes["id"] for attributes in elements.of("section") if "id" in attributes}
    assert ids == {"s1", "s2", "s3"}
    assert {"#s1", "#s2", "#s3"} <= {link["href"] for link in elements.of("a")}
    assert "End to end, pinned on 4 devices" in elements.text
    assert "scipy.ndimage.convolve, 1 core" in elements.text
    assert "CPU device, its rank and loader workers [% of its cores]" in elements.text


@pytest.mark.parametrize("name", ["trained", "several"])
def test_the_page_fetches_nothing_and_runs_nothing(
    name: str, request: pytest.FixtureRequest
) -> None:
    elements = Elements(request.getfixturevalue(name))
    tags = {tag for tag, _ in elements.found}
    assert not tags & {"script", "link", "img", "iframe", "object", "embed", "image", "use", "form"}
    for _, attributes in elements.found:
        assert not [key for key in attributes if key.startswith("on") or key in ("src", "style")]
        assert (attributes.get("href") or "#").startswith("#")


def test_the_policy_names_the_one_style_sheet_by_its_hash(trained: str) -> None:
    style = re.search(r"<style>(.*?)</style>", trained, re.DOTALL)
    assert style is not None
    digest = b64encode(hashlib.sha256(style[1].encode()).digest()).decode()
    (policy,) = [
        str(meta["content"])
        for meta in Elements(trained).of("meta")
        if meta.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policy == (
        f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    )


@pytest.mark.parametrize("name", ["trained", "several"])
def test_ids_are_unique_and_every_reference_has_one(
    name: str, request: pytest.FixtureRequest
) -> None:
    text = request.getfixturevalue(name)
    elements = Elements(text)
    ids = [attributes["id"] for _, attributes in elements.found if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert set(re.findall(r"url\(#([^)]+)\)", text)) <= set(ids)
    assert {str(link["href"])[1:] for link in elements.of("a")} <= set(ids)


def test_hostile_text_is_inert(tmp_path: Path) -> None:
    host = dataclasses.replace(
        measured.gpu_machine(), cpu=HOSTILE, os=HOSTILE, versions={HOSTILE: HOSTILE}
    )
    failed = measured.measurement(
        host, status="crashed", cause=FailureCause(text=HOSTILE), ranks=(), batch=64, folder=HOSTILE
    )
    doubted = measured.measurement(host, doubts=(Caveat(kind=HOSTILE, text=HOSTILE),))
    parts = (measured.part(HOSTILE, 1.0, note=HOSTILE), measured.part("scipy", 5, baseline=True))
    rank = dataclasses.replace(doubted.ranks[0], parts=parts)
    operation = dataclasses.replace(doubted, ranks=(rank,))
    text = rendered(tmp_path, failed, operation)
    tags = {tag for tag, _ in Elements(text).found}
    assert not tags & {"script", "img"}
    assert "\x1b" not in text
    assert "alert(1)" in text


def test_a_single_cell_is_a_report_too(tmp_path: Path) -> None:
    text = rendered(tmp_path, measured.measurement(steps=100))
    assert "images/s on 1 device at batch 128" in Elements(text).text


def test_only_failures_are_a_report_too(tmp_path: Path) -> None:
    made = measured.measurement(status="oom", cause=FailureCause(text="full"), ranks=())
    assert "No measurement ran to its end." in Elements(rendered(tmp_path, made)).text


def test_one_batch_over_two_plans_on_one_device(tmp_path: Path) -> None:
    made = [measured.measurement(precision=precision) for precision in ("fp32", "bf16")]
    assert "images/s over plans" in Elements(rendered(tmp_path, *made)).text


def test_dark_colours_replace_every_colour_of_a_figure(trained: str) -> None:
    figures = "".join(re.findall(r"<figure.*?</figure>", trained, re.DOTALL))
    used = set(re.findall(r'(?:fill|stroke)="(#[0-9a-f]{3,6})"', figures))
    replaced = set(re.findall(r'="(#[0-9a-f]{6})"\]\{', trained))
    assert used <= replaced


def test_the_machine_is_described_without_what_it_does_not_say() -> None:
    facts = dict(machine_rows(measured.gpu_machine(4)))
    assert facts["GPUs"] == "4 × NVIDIA H200 141 GiB"
    assert facts["links between GPUs"] == "nvlink NV18"
    bare = dict(machine_rows(Machine(cpu="CPU", cores=2, memory_bytes=2**33)))
    assert set(bare) == {"processor", "memory"}


def test_the_cell_that_is_named_is_drawn(training: Path) -> None:
    measurements = sections.load_measurements(training)
    chosen = measured_grids.training_grid()[1]
    text = Elements(report_page(sections.group_sections(measurements), training, chosen.cell)).text
    assert "During the run of 2 devices · batch 128 · channels_first · ddp" in text
