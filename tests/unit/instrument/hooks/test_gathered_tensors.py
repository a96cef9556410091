"""Products of gathered tensors are found; those with samples of the rank are not."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from nfold.instrument.hooks.gathered_tensors import EVENT, PAIRED, GatheredTensors, is_parameter_of
from nfold.instrument.hooks.runtime_hooks import EventCounter

OWN, OTHER = torch.ones(4, 3), torch.ones(4, 3)
HEAD, UNWRAPPED = nn.Linear(3, 2), nn.Linear(3, 2)


@pytest.fixture
def observed() -> Iterator[tuple[EventCounter, Callable[[Tensor], Tensor]]]:
    events = EventCounter()
    events.enabled = True
    mode = GatheredTensors(events, lambda tensor: is_parameter_of([HEAD], tensor))

    def gather(own: Tensor) -> Tensor:
        outputs = [own.clone(), own.clone()]
        mode.on_gather(outputs)
        return torch.cat([own, outputs[1]])

    gather(OWN)
    mode.on_step()
    yield events, gather
    mode.stop()


Gather = Callable[[Tensor], Tensor]


@pytest.mark.parametrize(
    ("step", "repeated"),
    [
        (lambda gather: gather(OWN) @ gather(OTHER).t(), True),
        (lambda gather: torch.einsum("ad,bd->ab", gather(OWN) / 2, gather(OTHER)), True),
        (lambda gather: (gather(OWN)[:, None] - gather(OTHER)[None]).norm(dim=2), True),
        (lambda gather: HEAD(gather(OWN)), True),
        (lambda gather: OWN @ gather(OTHER).t(), False),
        (lambda gather: UNWRAPPED(gather(OWN)), False),
        (lambda gather: (gather(OWN) == gather(OTHER)).float().mean(), False),
        (lambda gather: HEAD(OWN), False),
    ],
)
def test_products_of_gathered_tensors_are_repeated_on_every_rank(
    observed: tuple[EventCounter, Gather], step: Callable[[Gather], Tensor], repeated: bool
) -> None:
    events, gather = observed
    step(gather)
    assert (EVENT in dict(events.source_locations(1))) == repeated


def test_samples_of_the_rank_against_those_of_all_are_pairs(
    observed: tuple[EventCounter, Gather],
) -> None:
    events, gather = observed
    scores = OWN @ gather(OTHER).t()
    assert list(dict(events.source_locations(1))) == [PAIRED]
    torch.softmax(scores, 1) @ torch.ones(8, 1)
    assert list(dict(events.source_locations(1))) == [PAIRED]


def test_one_step_is_observed_after_the_first_with_a_gather() -> None:
    mode = GatheredTensors(EventCounter(), lambda _: False)
    mode.on_step()
    assert not torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    mode.on_gather(torch.ones(1))
    mode.on_step()
    assert torch.overrides._get_current_function_mode_stack() == [mode]  # type: ignore[no-untyped-call]
    mode.on_gather(torch.ones(1))
    mode.on_step()
    mode.on_step()
    assert not torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
