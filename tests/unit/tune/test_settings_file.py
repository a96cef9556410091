"""nfold.toml: remedies are written and read, invalid files are refused, other keys stay."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest

import made
from nfold.core.errors import MachineUnfit, UsageError
from nfold.core.plan import Plan
from nfold.core.stats import Interval
from nfold.core.variant import Variant
from nfold.core.workload import Workload
from nfold.interventions.registry import REGISTRY
from nfold.tune.settings_file import KeptRemedy, TunedSettings, keepable_remedies

CHANNELS_LAST = KeptRemedy(
    name="channels_last",
    value=True,
    numerics="rounding",
    place="train.py:31",
    reason='reorders "images" in every step\n→ a copy \x7f',
    gain=Interval(1.125, 1.1, 1.15),
)
SETTINGS = TunedSettings(
    command=("train.py", "--epochs", "3"),
    code="0123456789abcdef",
    device="cuda",
    devices=2,
    machine="abcdef0123",
    description="2 × NVIDIA H100, 32 cores",
    versions={"torch": "2.13.0", "nfold": "0.1.0"},
    when="2026-01-31T12:00:00+00:00",
    gain=Interval(1.93, 1.88, 1.97),
    remedies=(
        KeptRemedy(name="workers", value=4),
        CHANNELS_LAST,
        KeptRemedy(name="compiled", value="reduce-overhead", gain=Interval(1.05)),
        KeptRemedy(name="threads", value=2),
    ),
)


def test_settings_survive_writing() -> None:
    assert TunedSettings.from_toml(SETTINGS.to_toml()) == SETTINGS
    table = tomllib.loads(SETTINGS.to_toml())["tune"]
    assert list(table["remedies"]) == ["workers", "channels_last", "compiled", "threads"]
    assert table["remedies"]["channels_last"]["gain"] == {"value": 1.125, "low": 1.1, "high": 1.15}


@pytest.mark.parametrize("name", keepable_remedies())
def test_every_remedy_survives_writing(name: str) -> None:
    kind = REGISTRY[name].value_type if name in REGISTRY else int
    value: Any = not REGISTRY[name].default if kind is bool else 3
    if get_origin(kind) is Literal:
        value = get_args(kind)[-1]
    if name == "run_plan":
        value = (("precision", "bf16"), ("exchange", "bf16"))
    one = dataclasses.replace(SETTINGS, remedies=(KeptRemedy(name=name, value=value),))
    assert TunedSettings.from_toml(one.to_toml()).remedies == one.remedies
    assert one.remedies[0].numerics_class in ("same", "rounding", "training")


@pytest.mark.parametrize("name", keepable_remedies())
def test_every_remedy_is_documented(name: str) -> None:
    page = Path(__file__).resolve().parents[3] / "docs" / "tune.md"
    assert f"| `{name}` |" in page.read_text()


def test_what_a_run_applies() -> None:
    remedies = SETTINGS.run_remedies()
    assert remedies.variant == Variant(channels_last=True, compiled="reduce-overhead", threads=2)
    assert remedies.workers == 4
    assert set(remedies.names) == {"channels_last", "compiled", "threads", "workers"}
    off = KeptRemedy(name="channels_last", value=False)
    assert dataclasses.replace(SETTINGS, remedies=(off,)).run_remedies().names == ()


def test_a_remedy_that_the_devices_do_not_have_is_refused_in_a_run() -> None:
    names = ("tf32", "find_unused_parameters")
    kept = tuple(KeptRemedy(name=n, value=not REGISTRY[n].default) for n in names)
    settings = dataclasses.replace(SETTINGS, remedies=kept)
    assert settings.run_remedies().names == ("find_unused_parameters", "tf32")
    remedies = settings.run_remedies("cpu", 1)
    assert remedies.names == ()
    reasons = dict(remedies.refused)
    assert reasons["tf32"] == "CPU devices have no TF32"
    assert "DistributedDataParallel" in reasons["find_unused_parameters"]


HEAD = SETTINGS.to_toml().partition("[tune.remedies.")[0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a = ", ["not TOML"]),
        ("workers = 2", ["no table [tune]", "nfold tune"]),
        ("tune = 2", ["no table [tune]"]),
        (HEAD.replace("schema = 1", "schema = 2"), ["schema 2", "allowed is 1", "upgrade nfold"]),
        (HEAD.replace("schema = 1", ""), ["schema None", "allowed is 1"]),
        (HEAD.replace("devices = 2", ""), ["has no devices"]),
        (HEAD.replace("devices = 2", "devices = '2'"), ["devices", "'2'", "int"]),
        (HEAD.replace("devices = 2", "devices = 0"), ["devices 0", "from 1"]),
        (HEAD.replace('device = "cuda"', 'device = "tpu"'), ["'tpu'", "cpu, cuda"]),
        (HEAD.replace("[tune]", "[tune]\ndevice_count = 2"), ["'device_count'", "devices"]),
        (HEAD + "[tune.remedies]\nchanels_last = true", ["'chanels_last'", "are channels_last"]),
        (HEAD + "[tune.remedies]\nchannels_last = 1", ["channels_last", "1", "bool"]),
        (HEAD + "[tune.remedies]\ncompiled = 'fast'", ["'fast'", "reduce-overhead"]),
        (HEAD + "[tune.remedies]\nthreads = 0", ["threads 0", "from 1"]),
        (HEAD + "[tune.remedies]\nworkers = -1", ["workers -1", "from 0"]),
        (HEAD + "[tune.remedies]\nworkers = true", ["workers True", "from 0"]),
        (HEAD + "[tune.remedies]\nstrategy = 'ddp'", ["'strategy'", "allowed are"]),
        (HEAD + "[tune.remedies]\nexchange = 'none'", ["'exchange'", "only measures", "allowed"]),
        (HEAD + "[tune.remedies]\ncaptured = true", ["'captured'", "belongs to the script"]),
        (HEAD + "[tune.remedies.tf32]\nplace = 'a.py:1'", ["'tf32' has no value"]),
        (HEAD + "[tune.remedies.tf32]\nvalue = true\nline = 1", ["remedies.tf32", "line", "place"]),
        (HEAD + "[tune.remedies.tf32]\nvalue = true\nnumerics = 'none'", ["'none'", "rounding"]),
    ],
)
def test_an_invalid_file_is_refused(tmp_path: Path, text: str, words: list[str]) -> None:
    file = tmp_path / "nfold.toml"
    file.write_text(text)
    with pytest.raises(UsageError) as error:
        TunedSettings.read(file)
    assert [word for word in [str(file), *words] if word not in str(error.value)] == []


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"gone.toml does not exist.*next: nfold tune"):
        TunedSettings.read(tmp_path / "gone.toml")


def test_a_remedy_without_a_table_has_its_value_only() -> None:
    text = f"{HEAD}[tune.remedies]\nchannels_last = true\n"
    (remedy,) = TunedSettings.from_toml(text).remedies
    assert remedy == KeptRemedy(name="channels_last", value=True)
    assert remedy.numerics_class == "rounding"


PLAN = '# my plan\nprecision = "bf16"  # fast\nworkers = 3\n'


@pytest.mark.parametrize("rounds", [1, 2])
def test_writing_keeps_the_plan(tmp_path: Path, rounds: int) -> None:
    file = tmp_path / "nfold.toml"
    file.write_text(PLAN)
    for _ in range(rounds):
        SETTINGS.write(file)
    assert file.read_text() == f"{PLAN}\n{SETTINGS.to_toml()}"
    assert TunedSettings.read(file) == SETTINGS
    assert Plan.from_toml(file.read_text()) == Plan(precision="bf16", workers=3)
    dataclasses.replace(SETTINGS, remedies=()).write(file)
    assert TunedSettings.read(file).remedies == ()
    assert Plan.from_toml(file.read_text()) == Plan(precision="bf16", workers=3)


def test_writing_into_no_file_or_a_damaged_one(tmp_path: Path) -> None:
    file = tmp_path / "new" / "nfold.toml"
    SETTINGS.write(file)
    assert file.read_text() == SETTINGS.to_toml()
    for damaged in ("a = ", "tune = {a = 1}\n"):
        file.write_text(damaged)
        with pytest.raises(UsageError, match=r"nfold.toml"):
            SETTINGS.write(file)
        assert file.read_text() == damaged


def test_a_plan_ignores_only_the_tables_of_tune() -> None:
    with pytest.raises(UsageError, match="'tunes'"):
        Plan.from_toml("[tunes]\na = 1")
    with pytest.raises(UsageError, match="'tune'"):
        Plan.from_toml("tune = 1")


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("import sys\nimport helper\n")
    (tmp_path / "helper.py").write_text("rate = 1\n")
    (tmp_path / "data.json").write_text("[1]")
    return Path("train.py")


def tuned_here(script: Path, *arguments: str, **changes: Any) -> TunedSettings:
    workload = Workload.from_script(str(script), *arguments)
    fields: dict[str, Any] = {
        "command": workload.script,
        "code": workload.code,
        "machine": made.machine().id,
    }
    return dataclasses.replace(SETTINGS, **fields, device="cpu", **changes)


def test_a_run_of_the_same_script_matches(script: Path) -> None:
    settings = tuned_here(script, "data.json", "--epochs", "3")
    for arguments in (("data.json", "--epochs", "3"), ("--epochs", "9")):
        workload = Workload.from_script("train.py", *arguments)
        assert settings.mismatches(workload, "cpu", 2, made.machine()) == []
        assert bool(settings.other_arguments(workload)) == (arguments[0] != "data.json")
    assert "--epochs 9" in str(settings.other_arguments(workload))


@pytest.mark.parametrize("changed", ["train.py", "helper.py", "data.json"])
def test_a_changed_script_does_not_match(script: Path, changed: str) -> None:
    settings = tuned_here(script, "data.json")
    Path(changed).write_text("rate = 2\n")
    workload = Workload.from_script("train.py", "data.json")
    (mismatch,) = settings.mismatches(workload, "cpu", 2, made.machine())
    assert isinstance(mismatch, UsageError)
    assert "train.py is not what was measured on 2026-01-31" in str(mismatch)
    assert "--force" in str(mismatch)


def test_other_devices_or_another_machine_do_not_match(script: Path) -> None:
    settings, workload = tuned_here(script), Workload.from_script("train.py")
    other = dataclasses.replace(made.machine(), cores=99)
    for device, ranks, machine, words in [
        ("cpu", 1, made.machine(), "2 CPU ranks, this run has 1 CPU rank; next: --devices cpu:2"),
        ("cuda", 2, made.machine(), "this run has 2 GPU ranks"),
        ("cpu", 2, other, f"this is {other.id}"),
    ]:
        (mismatch,) = settings.mismatches(workload, device, ranks, machine)
        assert isinstance(mismatch, MachineUnfit)
        assert words in str(mismatch)
    assert len(settings.mismatches(workload, "cpu", 4, other)) == 2
    one_process = tuned_here(script, ranks=1)
    assert one_process.mismatches(workload, "cpu", 1, made.machine()) == []


def test_secrets_are_not_written(script: Path) -> None:
    arguments = ("--api-key", "hunter2", str(Path.home() / "data"))
    settings = tuned_here(script, *arguments)
    text = settings.to_toml()
    assert "hunter2" not in text
    assert str(Path.home()) not in text
    read, workload = TunedSettings.from_toml(text), Workload.from_script("train.py", *arguments)
    assert read.mismatches(workload, "cpu", 2, made.machine()) == []
    assert read.other_arguments(workload) is None
