"""Batch norm over the global batch: 2, 3 and 4 gloo ranks against plain layers on one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import launched
from integration.scripts.synchronised import COUNTS, LAYERS, layers, losses, samples

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow("batch norm", parts=6),
    pytest.mark.timeout(300),
]

SCRIPT = Path(__file__).parent / "scripts" / "synchronised.py"
APPROXIMATE = {"large_mean": 2e-3, "bf16": 6e-2}
"""Tolerances of what is not computed in fp64."""

ON_FOUR = pytest.mark.slow("batch norm on four devices")


class Found(dict[int, list[dict[str, Any]]]):
    """What every rank of a world found, which is launched when a test asks for it."""

    def __init__(self, folders: pytest.TempPathFactory) -> None:
        self._folders = folders

    def __missing__(self, world: int) -> list[dict[str, Any]]:
        self[world] = launch(world, self._folders.mktemp(f"world-{world}"))
        return self[world]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return Found(tmp_path_factory)


def launch(world: int, folder: Path, kind: str = "cpu") -> list[dict[str, Any]]:
    """Run the script on ``world`` ranks to their end; what each found."""
    launched.launch(SCRIPT, world, str(folder), kind)
    return [torch.load(folder / f"{rank}.pt") for rank in range(world)]


def reference(name: str) -> dict[str, Any]:
    """The same two steps with plain layers on the whole batch in fp64."""
    module = layers(name).double()
    x, factors = (part.double() for part in samples(name))
    for scale in (0.5, 1.0):
        module.zero_grad()
        whole = (x * scale).requires_grad_()
        outputs = module(whole)
        losses(outputs, factors).mean().backward()  # type: ignore[no-untyped-call]
    return {
        "outputs": outputs.detach(),
        "of_x": whole.grad,
        "gradients": [parameter.grad for parameter in module.parameters()],
        "state": module.state_dict(),
    }


def close(name: str, one: Tensor, other: Tensor) -> bool:
    tolerance = APPROXIMATE.get(name, 1e-12)
    scale = max(1.0, float(other.abs().max()))
    return one.shape == other.shape and torch.allclose(
        one.double(), other.double(), rtol=tolerance, atol=tolerance * scale
    )


several = pytest.mark.parametrize("world", [2, 3, pytest.param(4, marks=ON_FOUR)])
every = pytest.mark.parametrize("name", LAYERS)


@several
@every
def test_outputs_are_those_of_the_whole_batch(found: Found, name: str, world: int) -> None:
    together = torch.cat([rank[name]["outputs"] for rank in found[world]])
    assert close(name, together, reference(name)["outputs"])


@several
@every
def test_gradients_are_those_of_the_whole_batch(found: Found, name: str, world: int) -> None:
    expected = reference(name)
    assert close(name, torch.cat([rank[name]["of_x"] for rank in found[world]]), expected["of_x"])
    for rank in found[world]:
        pairs = zip(rank[name]["gradients"], expected["gradients"], strict=True)
        assert all(close(name, own, whole) for own, whole in pairs)


@several
@every
def test_the_state_is_that_of_the_whole_batch_on_every_rank(
    found: Found, name: str, world: int
) -> None:
    expected = reference(name)["state"]
    for rank in found[world]:
        state = rank[name]["state"]
        assert list(state) == list(expected)
        assert all(close(name, state[key], expected[key]) for key in expected)
        assert all(torch.equal(state[k], v) for k, v in found[world][0][name]["state"].items())


def test_a_sample_that_pads_has_no_gradient(found: Found) -> None:
    """Of a loss that is weighted already; else the exchange counts what it has zero."""
    of_x = found[3][COUNTS[3].index(0)]["loss_weighted"]["padded_of_x"]
    assert of_x.shape[0] == 1
    assert (of_x == 0).all()


def test_types_and_layouts_stay(found: Found) -> None:
    (first, *_) = found[2]
    assert first["bf16"]["outputs"].dtype == torch.bfloat16
    assert first["channels_last"]["is_channels_last"]
    assert not first["2d"]["is_channels_last"]


@several
def test_statistics_of_16_bit_values_are_computed_in_32(found: Found, world: int) -> None:
    state, expected = found[world][0]["bf16"]["state"], reference("bf16")["state"]
    for key in ("0.running_mean", "0.running_var"):
        assert torch.allclose(state[key].double(), expected[key], rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "world"),
    [
        ("synchronised", 2),
        ("own_exchange", 2),
        pytest.param("synchronised", 4, marks=ON_FOUR),
    ],
)
def test_losses_do_not_depend_on_the_number_of_devices(found: Found, name: str, world: int) -> None:
    (one_device,) = found[1]
    assert len(one_device["synchronised"]) == 50
    for rank in found[world]:
        assert rank[name] == pytest.approx(one_device["synchronised"], rel=1e-8)


def test_parts_of_all_devices_together_have_the_same_statistics_on_any_number(
    found: Found,
) -> None:
    """Batches of 18 in three parts; the last of an epoch, of 2, is all of the second device's."""
    (one_device,) = found[1]
    assert one_device["in_parts"] != pytest.approx(one_device["synchronised"][:20], rel=1e-4)
    for rank in found[2]:
        assert rank["in_parts"] == pytest.approx(one_device["in_parts"], rel=1e-8)


def test_losses_depend_on_it_where_every_device_has_its_own_statistics(found: Found) -> None:
    """So the test above can fail."""
    (one_device,) = found[1]
    pairs = zip(one_device["synchronised"], found[2][0]["device"], strict=True)
    apart = [abs(other / one - 1) for one, other in pairs]
    assert apart[0] > 1e-4
    assert max(apart) > 1e-2
