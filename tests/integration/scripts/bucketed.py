"""Train on sentences in batches of equal length, with a custom sampler and sparse gradients."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, Sampler

WORDS, SENTENCES, NUMBERS = 500, 600, 240


class Sentences(Dataset[torch.Tensor]):
    """Of 4 to 12 words."""

    def __len__(self) -> int:
        """Their number."""
        return SENTENCES

    def __getitem__(self, index: int) -> torch.Tensor:
        """One of them, the same every time."""
        return (torch.arange(4 + index % 9) * (index + 7)) % WORDS


class ByLength(Sampler[list[int]]):
    """As many sentences of one length as have so many words, another part on each rank."""

    def __init__(self) -> None:
        self._epoch = 0

    def __iter__(self) -> Iterator[list[int]]:
        """The batches of this rank, in an order that is every rank's."""
        self._epoch += 1
        lengths: dict[int, list[int]] = {}
        for index in range(SENTENCES):
            lengths.setdefault(4 + index % 9, []).append(index)
        batches = []
        for length, found in lengths.items():
            each = NUMBERS // length
            batches += [found[start : start + each] for start in range(0, len(found), each)]
        random.Random(self._epoch).shuffle(batches)
        world = dist.get_world_size()
        whole = len(batches) - len(batches) % world
        yield from batches[dist.get_rank() : whole : world]


class Model(nn.Module):
    """A word from the mean of those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 16, sparse=True)
        self.head = nn.Linear(16, WORDS)

    def forward(self, sentences: torch.Tensor) -> torch.Tensor:
        """Scores of the last word."""
        scores: torch.Tensor = self.head(self.words(sentences[:, :-1]).mean(1))
        return scores


def main() -> None:
    """Train for ever."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    loader = DataLoader(Sentences(), batch_sampler=ByLength())
    model = Model()
    wrapped = DistributedDataParallel(model)
    sparse = torch.optim.SparseAdam(list(model.words.parameters()))
    dense = torch.optim.Adam(model.head.parameters())
    while True:
        for sentences in loader:
            loss = nn.functional.cross_entropy(wrapped(sentences), sentences[:, -1])
            sparse.zero_grad()
            dense.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            sparse.step()  # type: ignore[no-untyped-call]
            dense.step()


if __name__ == "__main__":
    main()
