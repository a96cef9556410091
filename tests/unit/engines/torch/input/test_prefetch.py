"""Prefetching on a CPU device: the order of begin and finish. Copies: tests/gpu."""

from collections.abc import Iterator

import pytest
import torch

from nfold.engines.torch.batch import Batch
from nfold.engines.torch.input.dataloader import one_ahead, prefetch_batches


@pytest.mark.parametrize("n", [0, 1, 2, 5])
def test_every_item_comes_once_in_order_and_the_next_has_begun(n: int) -> None:
    begun: list[int] = []

    def begin(item: int) -> str:
        begun.append(item)
        return f"begun {item}"

    given = 0
    for item in one_ahead(range(n), begin, lambda text: int(text.split()[1])):
        assert item == given
        given += 1
        assert begun == list(range(min(given + 1, n)))
    assert given == n


def test_no_more_than_one_is_taken_ahead() -> None:
    taken: list[int] = []

    def items() -> Iterator[int]:
        for item in range(5):
            taken.append(item)
            yield item

    ahead = one_ahead(items(), lambda item: item, lambda item: item)
    assert taken == []
    next(ahead)
    assert taken == [0, 1]
    next(ahead)
    assert taken == [0, 1, 2]


def test_an_error_of_the_loader_comes_through() -> None:
    def items() -> Iterator[int]:
        yield 0
        raise OSError("a worker died")

    with pytest.raises(OSError, match="a worker died"):
        list(one_ahead(items(), lambda item: item, lambda item: item))


def test_on_a_cpu_device_nothing_is_between() -> None:
    tensors = (torch.zeros(1),)
    batch = Batch(tensors=tensors, epoch=0, count=1, global_count=1, sample_hash=0)
    (given,) = prefetch_batches([batch], torch.device("cpu"))
    assert given is batch
