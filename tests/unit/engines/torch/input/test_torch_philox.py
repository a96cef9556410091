"""Philox against the test vectors of Random123, and properties of keyed draws."""

import torch

from nfold.engines.sampling import philox
from nfold.engines.torch.input.preprocessing import draws, uniform_int
from philox_answers import KNOWN_ANSWERS


def test_published_vectors() -> None:
    for counter, key, expected in KNOWN_ANSWERS:
        words = [torch.tensor([word]) for word in counter]
        got = philox((words[0], words[1], words[2], words[3]), key)
        assert tuple(int(word.item()) for word in got) == expected


def test_a_draw_depends_only_on_its_keys() -> None:
    ids = torch.arange(100)
    whole = draws(7, 3, ids, 1)[0]
    parts = torch.cat([draws(7, 3, ids[:37], 1)[0], draws(7, 3, ids[37:], 1)[0]])
    assert torch.equal(whole, parts)
    for other in (draws(8, 3, ids, 1), draws(7, 4, ids, 1), draws(7, 3, ids, 2)):
        assert not torch.equal(whole, other[0])


def test_below_covers_its_range_evenly() -> None:
    drawn = uniform_int(draws(0, 0, torch.arange(90_000), 1)[0], 9)
    counts = torch.bincount(drawn, minlength=9)
    assert len(counts) == 9
    assert counts.min() > 9_600
    assert counts.max() < 10_400


def test_an_epoch_and_operations_may_be_tensors() -> None:
    ids = torch.arange(2**33, 2**33 + 50)
    operations = torch.tensor([[1], [2], [3]])
    stacked = draws(2**40 + 7, torch.tensor(3), ids, operations)
    for row, operation in enumerate((1, 2, 3)):
        one_device = draws(2**40 + 7, 3, ids, operation)
        for words, word in zip(stacked, one_device, strict=True):
            assert words.shape == (3, 50)
            assert torch.equal(words[row], word)
