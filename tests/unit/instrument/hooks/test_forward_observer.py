"""What the first forwards show."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from nfold.instrument.hooks.model_hooks import ForwardObserver


@pytest.fixture
def forward() -> Iterator[ForwardObserver]:
    made = ForwardObserver()
    made.start()
    yield made
    made.stop()


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.module(images)
        return found


def test_outermost_training_module_is_the_model(forward: ForwardObserver) -> None:
    wrapper = Wrapper(nn.Conv2d(3, 2, 1))
    wrapper.training = False
    nn.ReLU()(torch.ones(5))
    with torch.no_grad():
        wrapper(torch.ones(7, 3, 2, 2))
    assert forward.model is None
    wrapper(torch.ones(4, 3, 2, 2))
    assert forward.model is wrapper
    assert (forward.take_sample_count(), forward.take_sample_count()) == (4, 0)
    assert (forward.autocast, forward.channels_last) == (None, False)


def test_samples_passed_between_modules_count_once(forward: ForwardObserver) -> None:
    """An actor and a critic on one network; a discriminator, of real images and of made ones."""
    network, actor, critic = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(4, 1)
    hidden = network(torch.ones(6, 3))
    actor(hidden), critic(hidden)
    assert forward.take_sample_count() == 6
    generator, discriminator = nn.Linear(2, 3), nn.Linear(3, 1)
    made = generator(torch.ones(5, 2))
    discriminator(torch.ones(5, 3)), discriminator(made.detach()), discriminator(made)
    assert forward.take_sample_count() == 10
    users, items = nn.Embedding(9, 2), nn.Embedding(7, 2)
    users(torch.zeros(8, dtype=torch.long)), items(torch.zeros(8, dtype=torch.long))
    assert forward.take_sample_count() == 8
    network(torch.ones(3, 3, requires_grad=True))
    assert forward.take_sample_count() == 3


def test_failed_call_restores_the_depth(forward: ForwardObserver) -> None:
    wrapper = Wrapper(nn.Conv2d(3, 2, 1))
    with pytest.raises(RuntimeError):
        wrapper(torch.ones(4, 2, 2, 2))
    wrapper(torch.ones(4, 3, 2, 2))
    assert forward.model is wrapper


def test_autocast_and_layout_inside_a_model_are_recorded(forward: ForwardObserver) -> None:
    class Automatic(Wrapper):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return super().forward(images)

    Automatic(nn.Conv2d(3, 2, 1))(
        torch.ones(4, 3, 2, 2).contiguous(memory_format=torch.channels_last)
    )
    assert (forward.autocast, forward.channels_last) == ("bf16", True)


@pytest.mark.parametrize(("fraction", "draws"), [(0.5, True), (0.0, False)])
def test_random_numbers_of_the_model_are_noticed(
    forward: ForwardObserver, *, fraction: float, draws: bool
) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(fraction), nn.Linear(4, 2))
    for _ in range(2):
        torch.rand(5)  # outside the model
        model(torch.ones(6, 3))
    assert forward.draws_random_numbers == draws


def test_only_training_outermost_modules_keep_hooks() -> None:
    """A copy of it, to keep the best one, has nothing that cannot be copied or saved."""
    told: list[int] = []
    followed = ForwardObserver(on_forward=lambda: told.append(len(told)))
    followed.start()
    wrapper = Wrapper(nn.Conv2d(3, 2, 1))
    images = torch.ones(4, 3, 2, 2)
    wrapper(images)
    assert told == [0]
    assert not followed.keeps_hooks
    followed.keep_outermost_hooks()
    assert followed.keeps_hooks
    wrapper(images)
    wrapper.module(images)
    assert told == [0, 1]
    with torch.no_grad():
        wrapper(images)
    wrapper.eval()
    wrapper(images)
    assert told == [0, 1]
    wrapper.train()
    copied = pickle.loads(pickle.dumps(copy.deepcopy(wrapper)))
    assert list(copied.state_dict()) == list(wrapper.state_dict())
    followed.stop()
    wrapper(images)
    assert told == [0, 1]
    assert not wrapper._forward_pre_hooks


@pytest.mark.filterwarnings("ignore:Using `torch.compile")
def test_module_compiled_with_hooks_keeps_none() -> None:
    told: list[int] = []
    followed = ForwardObserver(on_forward=lambda: told.append(len(told)))
    followed.start()
    whole, wrapped = Wrapper(nn.Conv2d(3, 2, 1)), Wrapper(nn.Conv2d(3, 2, 1))
    images = torch.ones(4, 3, 2, 2)
    outside = torch.compile(wrapped, backend="eager")
    for module in (whole, outside):
        module(images)
    whole.compile(backend="eager")
    followed.keep_outermost_hooks()
    assert followed.keeps_hooks
    before = len(told)
    whole(images)
    assert len(told) == before
    outside(images)
    assert len(told) == before + 1
    followed.stop()
