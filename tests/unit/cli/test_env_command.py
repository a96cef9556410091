from __future__ import annotations

import io
import json

import pytest
from rich.console import Console
from typer.testing import CliRunner

from nfold.cli import env_command
from nfold.cli.app import app
from nfold.core.machine import Machine
from nfold.telemetry.machine_inspection import inspect_machine
from nfold.telemetry.nvml import Nvml
from nfold.telemetry.obstacles import Obstacle, find_obstacles, gather_facts
from nvml_fake import FakeCard, FakeNvml


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    cards = [FakeCard(0, nvlinks=["1"] * 4), FakeCard(1, nvlinks=["0"] * 4), FakeCard(2, p2p=5)]
    cards[0].ancestor = 50
    return inspect_machine(Nvml(FakeNvml(cards)))


def _shown(machine: Machine, found: list[Obstacle]) -> str:
    out = io.StringIO()
    env_command.print_machine(
        machine, found, Console(file=out, width=100, markup=False, highlight=False)
    )
    return out.getvalue()


def _run(monkeypatch: pytest.MonkeyPatch, api: FakeNvml, *arguments: str) -> str:
    monkeypatch.setattr(env_command, "Nvml", lambda: Nvml(api))
    done = CliRunner().invoke(app, ["env", *arguments])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_the_gpu_table_has_the_links(host: Machine) -> None:
    table = env_command.gpu_table(host)
    assert list(table.heads[4:7]) == ["to 0", "to 1", "to 2"]
    assert [row[4:7] for row in table.rows] == [
        ["·", "nvlink", "pcie"],
        ["nvlink", "·", "pcie"],
        ["pcie", "pcie", "·"],
    ]
    assert ("nvlink", "4 links") in env_command.link_details(host)


def test_devices_links_and_obstacles_are_shown(host: Machine) -> None:
    text = _shown(host, [Obstacle("Something [bold]grave", "a file says so")])
    for expected in (
        "NVIDIA Made-up",
        "80.0 GiB",
        "600.1",
        "GPU-11aa-bb",
        "nvlink: 4 links",
        "1.  Something [bold]grave",
        "source: a file says so",
        "open files",
        "torch",
    ):
        assert expected in text
    assert max(map(len, text.splitlines())) <= 100


def test_long_evidence_wraps_at_the_width(host: Machine) -> None:
    text = _shown(host, [Obstacle("word " * 60, "x" * 250)])
    assert max(map(len, text.splitlines())) <= 100
    assert "".join(text.split()).count("x" * 250) == 1


def test_a_machine_without_fault(host: Machine) -> None:
    assert "Nothing found that slows training" in _shown(host, [])


def test_json_is_versioned_and_the_machine_can_be_read_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    api = FakeNvml([], absent="Driver Not Loaded")
    document = json.loads(_run(monkeypatch, api, "--json"))
    assert set(document) == {"schema", "machine", "obstacles"}
    assert document["schema"] == 1
    assert Machine.from_dict(document["machine"]).gpus == ()
    assert "Driver Not Loaded" in document["obstacles"][0]["evidence"]
    assert set(document["obstacles"][0]) == {"text", "evidence"}


def test_piped_it_is_plain_and_at_most_100_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    text = _run(monkeypatch, FakeNvml([FakeCard(0, pids=[99_999_999], width=4)]))
    assert "\x1b" not in text
    assert "Another process is on GPU 0" in text
    assert "4 of its 16 PCIe lanes" in text
    assert max(map(len, text.splitlines())) <= 100


def test_obstacles_of_the_real_machine_all_say_how_they_are_known() -> None:
    with Nvml() as nvml:
        found = find_obstacles(inspect_machine(nvml), gather_facts(nvml))
    assert all(obstacle.text and obstacle.evidence for obstacle in found)


def test_names_cannot_steer_the_terminal(host: Machine) -> None:
    text = _shown(host, [Obstacle("\x1b]0;evil\x07", "\x1b[2J")])
    assert "\x1b" not in text
    assert "\x07" not in text
