"""Batches prefetched on a GPU equal direct copies while the step's stream is busy."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nfold.engines.torch.batch import Batch
from nfold.engines.torch.input.dataloader import prefetch_batches, prefetch_to_device

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
BUSY_CYCLES = 20_000_000
"""About 10 ms: the step reads a batch long after Python has forgotten it."""
BUSIER_CYCLES = 2_000_000_000
"""About a second: longer than Python takes for a batch, however busy the host is."""


def _batches(n: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)

    return [
        Batch(
            tensors=(drawn(256, 32, 32, 3), drawn(256).long(), drawn(256).long()),
            epoch=0,
            count=256,
            global_count=256,
            sample_hash=index,
        ).pin_memory()
        for index in range(n)
    ]


def _read_late(batch: Batch, cycles: int = BUSY_CYCLES) -> Tensor:
    """A step that is busy before it reads its batch."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
    return torch.stack([tensor.double().sum() for tensor in batch.tensors])


def test_every_step_reads_its_own_batch() -> None:
    device = torch.device("cuda", 0)
    batches = _batches(30)
    expected = [
        _read_late(batch.map_tensors(lambda tensor: tensor.to(device))) for batch in batches
    ]
    read = []
    hashes = []
    for batch in prefetch_batches(iter(batches), device):
        assert all(tensor.is_cuda for tensor in batch.tensors)
        read.append(_read_late(batch))
        hashes.append(batch.sample_hash)
        del batch
    assert hashes == list(range(30))
    assert torch.equal(torch.stack(read), torch.stack(expected))


@pytest.mark.alone
def test_the_host_does_not_wait_for_the_step() -> None:
    """The next batch is given out while the step before it is still busy."""
    device = torch.device("cuda", 0)
    # A kernel's first call loads it, and that waits for the device.
    _read_late(next(iter(prefetch_batches(_batches(1), device))), 1)
    steps: list[torch.cuda.Event] = []
    for batch in prefetch_batches(_batches(4), device):
        if steps:
            assert not steps[-1].query()  # type: ignore[no-untyped-call]
        _read_late(batch, BUSIER_CYCLES)
        steps.append(torch.cuda.current_stream(device).record_event())
    assert len(steps) == 4
    torch.cuda.synchronize(device)


def _read_by_a_script(n: int) -> list[tuple[int, dict[str, Tensor], Tensor]]:
    """Batches of a script's loader, of some form, and which they are."""
    found = enumerate(_batches(n))
    return [
        (at, dict(zip("abc", batch.tensors, strict=True)), torch.tensor([at]))
        for at, batch in found
    ]


def _sums_late(batch: dict[str, Tensor], cycles: int = BUSY_CYCLES) -> Tensor:
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
    return torch.stack([tensor.double().sum() for tensor in batch.values()])


def test_every_step_of_a_script_reads_its_own_batch() -> None:
    device = torch.device("cuda", 0)
    batches = _read_by_a_script(30)
    expected = [
        _sums_late({name: tensor.to(device) for name, tensor in batch.items()})
        for _, batch, _ in batches
    ]
    read = []
    for number, (at, batch, ids) in enumerate(prefetch_to_device(batches, device)):
        assert at == number == ids.item()
        assert all(tensor.is_cuda for tensor in batch.values())
        read.append(_sums_late(batch))
        del batch
    assert len(read) == 30
    assert torch.equal(torch.stack(read), torch.stack(expected))


@pytest.mark.alone
def test_a_script_s_host_does_not_wait_for_its_step() -> None:
    device = torch.device("cuda", 0)
    steps: list[torch.cuda.Event] = []
    for _, batch, _ in prefetch_to_device(_read_by_a_script(4), device):
        if steps:
            assert not steps[-1].query()  # type: ignore[no-untyped-call]
        _sums_late(batch, BUSIER_CYCLES)
        steps.append(torch.cuda.current_stream(device).record_event())
    assert len(steps) == 4
    torch.cuda.synchronize(device)
