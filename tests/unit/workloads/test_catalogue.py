from __future__ import annotations

import os
import subprocess
import sys

import pytest

from nfold import data, workloads
from nfold.core import fingerprint
from nfold.core.errors import UnknownValue, UsageError
from nfold.core.workload import Workload
from nfold.data import photographs

TRAINING = [name for name in workloads.NAMES if workloads.info(name).kind == "training"]


@pytest.mark.parametrize("name", workloads.NAMES)
def test_every_workload_has_a_description(name: str) -> None:
    known = workloads.info(name)
    assert known.name == name
    assert len(known.summary) > 20
    assert len(known.source) > 10


@pytest.mark.parametrize("name", TRAINING)
def test_a_training_workload_has_real_data_and_a_limit_on_it(name: str) -> None:
    known = workloads.info(name)
    assert known.dataset in {*data.DATA_SETS, photographs.NAME}
    assert workloads.parameters(Workload.parse(name))["samples"] == 0
    assert workloads.parameters(Workload.parse(f"{name}:samples=2000"))["samples"] == 2000


@pytest.mark.parametrize("name", TRAINING)
def test_fewer_than_no_samples_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match=r"samples=-1.*from 0"):
        workloads.parameters(Workload.parse(f"{name}:samples=-1"))


def test_an_unknown_name_lists_the_closest_first() -> None:
    with pytest.raises(UnknownValue, match="allowed are cnn10"):
        workloads.info("cnn")


def test_module_without_function_is_refused() -> None:
    with pytest.raises(UnknownValue, match="MODULE:FUNCTION"):
        workloads.info("project")


def test_a_built_in_workload_has_no_code_but_an_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, _ in fingerprint.library_variables(os.environ):
        monkeypatch.delenv(name)
    assert workloads.with_fingerprint(Workload.parse("digits")) == Workload(name="digits")
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    found = workloads.with_fingerprint(Workload.parse("digits"))
    assert found == Workload(name="digits", variables=(("NCCL_ALGO", "Ring"),))
    assert found.for_checkpoints == Workload(name="digits")


def test_an_unknown_parameter_lists_the_known_ones() -> None:
    with pytest.raises(UnknownValue, match="parameter of wide_resnet 'dept': allowed are depth"):
        workloads.parameters(Workload.parse("wide_resnet:dept=16"))


def test_the_catalogue_is_light() -> None:
    heavy = ("torch", "numpy", "scipy")
    code = (
        "import sys; from nfold import workloads; [workloads.info(n) for n in workloads.NAMES]; "
        f"print([m for m in {heavy} if m in sys.modules])"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"
