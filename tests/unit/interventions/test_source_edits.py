"""The edits that keep remedies in a script, from its profile to the patch."""

from __future__ import annotations

import dataclasses
import runpy
from pathlib import Path

import pytest
import torch

from instrumented import instrumented, script_task
from nfold.core.script_profile import DataLoaderProfile, ScriptProfile, SourceLocation
from nfold.core.source_edit import AddStatement, SetKeywords, SetVariable
from nfold.interventions.registry import REGISTRY
from nfold.tune.plan_edits import loader_worker_edits
from nfold.tune.source_patch import make_patch


def profile(parallel: str = "ddp", /, **lines: str | SourceLocation) -> ScriptProfile:
    """Return a profile with one or more lines of each event, separated by spaces."""
    found = {
        event: (given,)
        if isinstance(given, SourceLocation)
        else tuple(SourceLocation(line=line) for line in given.split())
        for event, given in lines.items()
    }
    return ScriptProfile(parallel=parallel, source_locations=found)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "keyword", "value"),
    [
        ("broadcast_buffers", "broadcast_buffers", False),
        ("gradient_as_bucket_view", "gradient_as_bucket_view", True),
        ("find_unused_parameters", "find_unused_parameters", False),
    ],
)
def test_arguments_of_every_wrapper_are_set(name: str, keyword: str, value: bool) -> None:
    found = REGISTRY[name].source_edits(value, profile(wrapper="gan.py:4 gan.py:5"))
    keywords = ((keyword, str(value)),)
    assert found == tuple(
        SetKeywords(location=line, function="DistributedDataParallel", keywords=keywords)
        for line in ("gan.py:4", "gan.py:5")
    )
    assert REGISTRY[name].source_edits(value, profile("dp", wrapper="gan.py:4")) is None


BY_PACKAGE = SourceLocation(line="train.py:9", package_line="accelerate/accelerator.py:1500")
IN_STEP = SourceLocation(line="train.py:9", per_step=1.0)
AT_PLACES = [
    ("broadcast_buffers", False, "wrapper"),
    ("gradient_compression", "bf16", "wrapper"),
    ("anomaly_detection", False, "anomaly"),
    ("channels_last", True, "model"),
    ("compiled", "default", "model"),
    ("cudnn_benchmark", True, "model"),
    ("tf32", True, "trainer"),
]


@pytest.mark.parametrize(("name", "value", "event"), AT_PLACES)
def test_there_is_no_edit_without_a_line_of_the_script(
    name: str, value: object, event: str
) -> None:
    edits = REGISTRY[name].source_edits
    assert edits(value, profile(**{event: "train.py:9"}))
    assert edits(value, profile()) is None
    assert edits(value, profile(**{event: BY_PACKAGE})) is None


@pytest.mark.parametrize(("name", "value"), [("compiled", "default"), ("cudnn_benchmark", True)])
def test_a_line_of_every_step_is_not_edited(name: str, value: object) -> None:
    assert REGISTRY[name].source_edits(value, profile(model=IN_STEP)) is None


def test_models_are_compiled_in_place() -> None:
    compiled = REGISTRY["compiled"]
    found = compiled.source_edits("reduce-overhead", profile(model="gan.py:2 gan.py:3"))
    statement = '{target}.compile(mode="reduce-overhead")'
    assert found == tuple(
        AddStatement(location=line, statement=statement) for line in ("gan.py:2", "gan.py:3")
    )


def test_variables_keep_the_settings_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    assert REGISTRY["expandable_segments"].source_edits(True, profile()) == (
        SetVariable(
            name="PYTORCH_CUDA_ALLOC_CONF", value="max_split_size_mb:64,expandable_segments:True"
        ),
    )
    assert REGISTRY["nccl_p2p"].source_edits(False, profile()) == (
        SetVariable(name="NCCL_P2P_DISABLE", value="1"),
    )


def test_threads_are_set_where_the_script_sets_them_or_by_a_variable() -> None:
    threads = REGISTRY["threads"]
    (edit,) = threads.source_edits(2, profile(threads="train.py:3")) or ()
    assert edit == SetKeywords(
        location="train.py:3", function="set_num_threads", keywords=(("count", "2"),)
    )
    variable = SetVariable(name="OMP_NUM_THREADS", value="2")
    assert threads.source_edits(2, profile()) == (variable,)
    assert threads.source_edits(None, profile()) is None


def test_remedies_without_one_place_and_experiments_have_no_edits() -> None:
    events = (
        "model",
        "wrapper",
        "step",
        "threads",
        "anomaly",
        "optimizer",
        "zeroed_gradients",
        "host_sync",
        "run",
    )
    everywhere = dataclasses.replace(
        profile(**dict.fromkeys(events, "train.py:9"), copy=IN_STEP),
        optimizers=("SGD",),
        loader=DataLoaderProfile(created_at="train.py:9"),
    )
    without = {"captured", "synchronised_batch_norm", "autocast_bf16"}
    without |= {"restored_affinity", "activation_checkpointing"}
    values = {"compiled": "default", "threads": 2, "nccl_algorithm": "Ring", "nccl_protocol": "LL"}
    values["run_plan"] = (("precision", "bf16"),)
    for name, intervention in REGISTRY.items():
        value = values.get(name, not intervention.default)
        found = intervention.source_edits(value, everywhere)
        assert (found is not None) == (intervention.kind == "remedy" and name not in without), name


def test_workers_are_set_where_the_script_creates_its_loader() -> None:
    loader = DataLoaderProfile(created_at="data.py:7")
    found = loader_worker_edits(8, ScriptProfile(loader=loader), persistent=True)
    keywords = (("num_workers", "8"), ("persistent_workers", "True"))
    assert found == (SetKeywords(location="data.py:7", function="DataLoader", keywords=keywords),)
    (edit,) = loader_worker_edits(0, ScriptProfile(loader=loader, trainer="lightning")) or ()
    assert edit.keywords == (("num_workers", "0"),)
    assert loader_worker_edits(8, ScriptProfile(loader=loader, trainer="transformers")) is None
    assert loader_worker_edits(8, ScriptProfile(loader=DataLoaderProfile())) is None
    assert loader_worker_edits(8, ScriptProfile()) is None


SCRIPT = """\
from torch import nn, optim
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
import torch

from instrumented import dataset, model

torch.set_num_threads(1)
torch.autograd.set_detect_anomaly(True)


def main():
    criterion = nn.CrossEntropyLoss().to("cpu")
    net = model()
    net.to(
        "cpu",
    )
    loader = DataLoader(
        dataset(),
        batch_size=8,
    )
    optimizer = optim.SGD(net.parameters(), lr=0.1)
    for _ in range(4):
        for images, labels in loader:
            optimizer.zero_grad()
            criterion(net(images), labels).backward()
            optimizer.step()


main()
"""

EXPECTED = """\
from torch import nn, optim
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
import torch

from instrumented import dataset, model

torch.set_num_threads(2)
torch.autograd.set_detect_anomaly(False)


def main():
    criterion = nn.CrossEntropyLoss().to("cpu")
    net = model()
    torch.set_float32_matmul_precision("high")
    net.to(
        "cpu",
    ).to(memory_format=torch.channels_last)
    net.compile()
    loader = DataLoader(
        dataset(),
        batch_size=8,
        num_workers=1,
    )
    optimizer = optim.SGD(net.parameters(), lr=0.1)
    for _ in range(4):
        for images, labels in loader:
            optimizer.zero_grad()
            criterion(net(images), labels).backward()
            optimizer.step()


main()
"""


def test_the_profile_of_a_script_leads_to_its_patch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    threads, anomalies = torch.get_num_threads(), torch.is_anomaly_enabled()
    try:
        run = instrumented(lambda: runpy.run_path("train.py"), script_task())
    finally:
        torch.set_num_threads(threads)
        torch.autograd.set_detect_anomaly(anomalies)
    assert run.samples is not None
    observed = run.profile
    changes = {"threads": 2, "anomaly_detection": False, "tf32": True, "channels_last": True}
    edits = [
        edit
        for name, value in {**changes, "compiled": "default"}.items()
        for edit in REGISTRY[name].source_edits(value, observed) or ()
    ]
    patch = make_patch([*edits, *(loader_worker_edits(1, observed) or ())], tmp_path)
    assert [str(each) for each in (*patch.refusals, *patch.flags)] == []
    assert patch.files[0].edited.decode() == EXPECTED
