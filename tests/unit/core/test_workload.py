"""Workloads: the written form and back, and what is not of the form."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from made import machine, plan
from nfold.core.errors import UsageError
from nfold.core.measurement import cell_id
from nfold.core.serialization import deserialize, serialize
from nfold.core.workload import Workload


@pytest.mark.parametrize(
    ("text", "workload"),
    [
        ("digits", Workload(name="digits")),
        (
            "wide_resnet:depth=16,width=4",
            Workload(name="wide_resnet", parameters=(("depth", 16), ("width", 4))),
        ),
        ("conv2d:filter=-3", Workload(name="conv2d", parameters=(("filter", -3),))),
        ("project:workload", Workload(name="project:workload")),
        (
            "Pack_age.mod1:make_it:N=3,depth=2",
            Workload(name="Pack_age.mod1:make_it", parameters=(("N", 3), ("depth", 2))),
        ),
    ],
)
def test_the_written_form_and_back(text: str, workload: Workload) -> None:
    assert Workload.parse(text) == workload
    assert str(workload) == text


def test_order_spaces_and_zeros_make_no_difference() -> None:
    written = Workload.parse("wide_resnet: width=04, depth=16")
    assert written == Workload.parse("wide_resnet:depth=16,width=4")
    assert hash(written) == hash(Workload.parse(str(written)))


@pytest.mark.parametrize("seed", range(30))
def test_any_parameters_survive_being_written(seed: int) -> None:
    draw = random.Random(seed)
    names = draw.sample(["depth", "width", "filter", "size", "copy_only"], draw.randint(0, 5))
    values = {name: draw.randint(-(10**9), 10**9) for name in names}
    workload = Workload(name="conv2d").with_parameters(**values)
    assert Workload.parse(str(workload)) == workload
    assert dict(workload.parameters) == values


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Digits",
        "digits ",
        "digits\n",
        "2d",
        "../digits",
        "digits:",
        "digits:,",
        "digits:a=1,",
        "digits:a=",
        "digits:a=1.5",
        "digits:a=b",
        "my-project:workload",
        "project.:workload",
        "project:workload:",
        "project:workload:depth",
        "project:1",
        "project:../x",
        "pröject:workload",
        "digits:a=1;b=2",
        "digits:a=" + "9" * 5000,
        "\x1b[31mdigits",
        "</script>",
    ],
)
def test_malformed_text_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UsageError, match="for example wide_resnet:depth=16,width=4") as refused:
        Workload.parse(text)
    assert "\x1b" not in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_parameter_given_twice_is_refused() -> None:
    with pytest.raises(UsageError, match="'depth' twice"):
        Workload.parse("wide_resnet:depth=16,depth=28")


def test_a_reference_names_a_module_and_a_function() -> None:
    assert Workload.parse("a.b:make:depth=2").function_reference == ("a.b", "make")
    assert Workload.parse("digits:samples=3").function_reference is None


def test_with_parameters_returns_a_new_workload() -> None:
    narrow = Workload.parse("wide_resnet:depth=16,width=1")
    assert str(narrow.with_parameters(width=4)) == "wide_resnet:depth=16,width=4"
    assert str(narrow) == "wide_resnet:depth=16,width=1"


def test_a_script_is_written_as_its_command_and_identified_by_its_content(
    tmp_path: Path,
) -> None:
    file = tmp_path / "train it.py"
    file.write_text("print(1)\n")
    found = Workload.from_script(str(file), "--lr", "0.1")
    assert str(found) == f"'{file}' --lr 0.1"
    assert (found.name, found.function_reference) == ("train it.py", None)
    assert deserialize(Workload, serialize(found)) == found
    requested = plan(), None, machine()
    assert cell_id(found, *requested) != cell_id(Workload.from_script(str(file)), *requested)
    file.write_text("import net\n")
    (tmp_path / "net.py").write_text("WIDTH = 3\n")
    other = Workload.from_script(str(file), "--lr", "0.1")
    assert other.code != found.code
    (tmp_path / "net.py").write_text("WIDTH = 4\n")
    assert Workload.from_script(str(file), "--lr", "0.1").code != other.code
    with pytest.raises(UsageError, match="cannot be read"):
        Workload.from_script(str(tmp_path / "missing.py"))


def test_a_module_is_written_as_its_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "train.py").write_text("from .net import make\n")
    found = Workload.from_module("pack.train", "--lr", "0.1")
    assert str(found) == "-m pack.train --lr 0.1"
    assert (found.name, found.module, found.function_reference) == (
        "pack.train",
        "pack.train",
        None,
    )
    assert deserialize(Workload, serialize(found)) == found
    (tmp_path / "pack" / "net.py").write_text("")
    assert Workload.from_module("pack.train", "--lr", "0.1").code != found.code
    with pytest.raises(UsageError, match=r"module 'pack.gone' is not found .* python -m pack.gone"):
        Workload.from_module("pack.gone")
    assert Workload.from_script("pack/train.py").module is None


def test_secrets_and_home_are_not_written_and_do_not_change_the_identity(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", "/home/alice")
    found = Workload(name="t.py", script=("/home/alice/t.py", "--token", "abc", "--lr", "1"))
    stored = found.redact()
    assert stored.script == ("~/t.py", "--token", "***", "--lr", "1")
    assert str(found) == str(stored) == "~/t.py --token '***' --lr 1"
    requested = plan(), None, machine()
    assert cell_id(stored, *requested) == cell_id(found, *requested)
    rotated = Workload(name="t.py", script=("/home/alice/t.py", "--token", "new", "--lr", "1"))
    assert cell_id(rotated, *requested) == cell_id(found, *requested)


def test_the_identity_without_secrets_is_stable() -> None:
    """Ids of version 0.1, which hashed the written form."""
    script = Workload(
        name="t.py", code="c0de", script=("/data/t.py", "--lr", "0.1"), variables=(("A", "/x"),)
    )
    assert cell_id(script, plan(), None, machine()) == "edccc78e2d"
    assert cell_id(Workload.parse("digits:samples=3"), plan(), None, machine()) == "5e4117b5dd"
