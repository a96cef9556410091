"""What every intervention has, and that the code uses only those that exist."""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest

from nfold.core.errors import UsageError
from nfold.core.variant import Variant
from nfold.engines.simulated import Scenario
from nfold.engines.simulated.simulation import ALWAYS_NAMED, _noise_label, _noise_repr
from nfold.interventions.intervention import Intervention, TorchSetting
from nfold.interventions.registry import REGISTRY

ROOT = Path(__file__).resolve().parents[3]
SOURCE = ROOT / "src" / "nfold"
HOOKS = ("environment", "ddp_arguments", "loader_arguments", "edit_plan")
EVERY = pytest.mark.parametrize("intervention", REGISTRY.values(), ids=lambda each: each.name)


def other_value(intervention: Intervention[Any]) -> Any:
    """Return a value that is not the default."""
    kind = intervention.value_type
    if kind is bool:
        return not intervention.default
    if get_origin(kind) is Literal:
        return get_args(kind)[-1]
    if get_origin(kind) is tuple:
        return (("precision", "bf16"),) if get_origin(get_args(kind)[0]) is tuple else (1, 0)
    return 3


@EVERY
def test_a_value_survives_storing(intervention: Intervention[Any]) -> None:
    value = other_value(intervention)
    variant = Variant(**{intervention.name: value})
    assert getattr(variant, intervention.name) == value
    assert Variant.from_dict(json.loads(json.dumps(variant.to_dict()))) == variant
    assert variant.without(intervention.name) == Variant()
    assert getattr(Variant(), intervention.name) == intervention.default
    assert "to_dict" not in intervention.stored_name
    assert intervention.label(value)


def test_stored_names_are_unique() -> None:
    assert len({each.stored_name for each in REGISTRY.values()}) == len(REGISTRY)


@EVERY
def test_a_remedy_says_what_it_does_to_the_numbers(intervention: Intervention[Any]) -> None:
    assert (intervention.kind == "remedy") == (intervention.numerics is not None)
    assert intervention.numerics != "training" or intervention.permission
    assert type(intervention).__doc__


@EVERY
def test_an_intervention_is_applied_somewhere(intervention: Intervention[Any]) -> None:
    own = any(getattr(type(intervention), hook) != getattr(Intervention, hook) for hook in HOOKS)
    assert own or isinstance(intervention, TorchSetting) or intervention.applied_in
    for place in intervention.applied_in:
        assert intervention.name in (SOURCE / place).read_text()


@EVERY
def test_environments_do_not_change_in_a_running_process(intervention: Intervention[Any]) -> None:
    value = other_value(intervention)
    if (
        intervention.environment(value, {})
        or intervention.ddp_arguments(value)
        or intervention.loader_arguments(value)
    ):
        assert not intervention.switchable


@EVERY
def test_every_intervention_can_be_simulated(intervention: Intervention[Any]) -> None:
    scenario = Scenario(intervention_ms={intervention.name: 2.5})
    removed = intervention.simulated_ms(other_value(intervention), scenario, 2)
    left = intervention.simulated_ms(intervention.default, scenario, 2)
    assert removed == 0.0
    assert left in (0.0, 2.5)


def test_an_unknown_intervention_is_refused() -> None:
    with pytest.raises(TypeError, match="no intervention exchnage"):
        Variant(exchnage="none")
    with pytest.raises(UsageError, match=r"'all': allowed are real, none, barrier$"):
        Variant(exchange="all")
    with pytest.raises(UsageError, match="intervention 'exchnage'"):
        Scenario(intervention_ms={"exchnage": 1.0})
    with pytest.raises(AttributeError, match="cannot be changed"):
        Variant().exchange = "none"


def _keywords() -> Iterator[tuple[str, str]]:
    """Yield (place, keyword) of every Variant that the project makes."""
    for folder in ("src", "tests", "benchmarks"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "Variant":
                    yield from (
                        (f"{file}:{node.lineno}", each.arg) for each in node.keywords if each.arg
                    )


def test_every_variant_in_the_code_names_interventions_that_exist() -> None:
    found = [place for place, keyword in _keywords() if keyword not in REGISTRY]
    assert [place for place in found if Path(__file__).name not in place] == []


def test_the_text_that_seeds_the_simulated_noise_is_the_same_in_every_version() -> None:
    first = list(REGISTRY.values())[:ALWAYS_NAMED]
    every = [Variant(**{each.name: other_value(each)}) for each in first]
    text = "\n".join([*map(_noise_label, every), _noise_repr(every)])
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "4955b1e95c088985"


def test_later_interventions_do_not_change_the_noise_of_other_variants() -> None:
    assert _noise_label(Variant()) == "nothing left out"
    assert _noise_repr([Variant()]).count("=") == ALWAYS_NAMED
