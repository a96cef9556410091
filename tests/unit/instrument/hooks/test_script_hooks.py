"""What stands between a script and PyTorch: imports, environment, loaders, reads, collectives."""

from __future__ import annotations

import dataclasses
import importlib
import multiprocessing
import os
import socket
import sys
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    SequentialSampler,
)

from instrumented import dataset, instrumented, loop, model, overrides, script_task
from made import machine
from nfold.core.errors import Unsupported
from nfold.core.import_hooks import call_after_import
from nfold.core.script_profile import ReplayHints
from nfold.core.variant import Variant
from nfold.engines.interleaver import ActiveVariant
from nfold.instrument.hooks import runtime_hooks
from nfold.instrument.hooks.patches import Patches
from nfold.instrument.hooks.runtime_hooks import (
    EventCounter,
    HostReads,
    is_nfold_frame,
    reading_frame,
)
from nfold.instrument.loss_log import LossLog
from nfold.instrument.rank_environment import (
    SINGLE_RANK_PORTS,
    TORCHRUN_VARIABLES,
    device_variables,
    rank_environment,
)


def test_import_callback_runs_after_the_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nfold_made_up.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    seen: list[int] = []
    finder = call_after_import(
        {
            "nfold_made_up": lambda m: seen.append(m.value),
            "json": lambda m: seen.append(len(m.dumps(2))),
        }
    )
    try:
        assert seen == [1]
        made_up = importlib.import_module("nfold_made_up")
        assert seen == [1, 1]
        assert type(made_up.__loader__).__name__ == "SourceFileLoader"
    finally:
        sys.meta_path.remove(finder)
        sys.modules.pop("nfold_made_up", None)


def test_module_may_have_two_import_callbacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nfold_made_twice.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    seen: list[int] = []
    finders = [
        call_after_import({"nfold_made_twice": lambda m: seen.append(m.value)}),
        call_after_import({"nfold_made_twice": lambda m: seen.append(m.value + 1)}),
    ]
    try:
        importlib.import_module("nfold_made_twice")
        assert sorted(seen) == [1, 2]
    finally:
        for finder in finders:
            sys.meta_path.remove(finder)
        sys.modules.pop("nfold_made_twice", None)


def _on_gpus(variant: Variant | None, rank: int = 0, world: int = 2, **changes: Any) -> Any:
    task = script_task(variant, world, device="cuda", **changes)
    return dataclasses.replace(task, rank=rank, local_rank=rank, machine=machine(gpus=4))


@pytest.mark.parametrize(
    ("task", "visible", "said"),
    [
        (_on_gpus(None, rank=1), None, "0,1"),
        (_on_gpus(None, rank=1), "5,7,9", "5,7"),
        (_on_gpus(Variant(devices=(1, 0)), rank=1), "5,7", "7,5"),
        (_on_gpus(Variant(independent=True), rank=1), "5,7", "7"),
        (_on_gpus(Variant(device=3), world=1), None, "3"),
        (_on_gpus(None, world=1, strategy="dp", devices=4), None, "0,1,2,3"),
    ],
)
def test_script_sees_the_gpus_of_its_plan(task: Any, visible: str | None, said: str) -> None:
    assert device_variables(task, visible) == {"CUDA_VISIBLE_DEVICES": said}


def test_environment_of_single_ranks_and_of_data_parallel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in (
        *TORCHRUN_VARIABLES,
        "OMP_NUM_THREADS",
        "GLOO_SOCKET_IFNAME",
        "NCCL_SOCKET_IFNAME",
    ):
        monkeypatch.setenv(name, "7")
    with rank_environment(script_task(Variant(threads=3))):
        assert [os.environ[n] for n in ("RANK", "LOCAL_RANK", "WORLD_SIZE")] == ["0", "0", "1"]
        assert "TORCHELASTIC_USE_AGENT_STORE" not in os.environ
        port = int(os.environ["MASTER_PORT"])
        assert port in SINGLE_RANK_PORTS
        assert os.environ["OMP_NUM_THREADS"] == "3"
    with socket.socket() as another:
        another.bind(("", port))
        with rank_environment(script_task(Variant(threads=3))):
            assert int(os.environ["MASTER_PORT"]) in {*SINGLE_RANK_PORTS} - {port}
    with rank_environment(script_task(strategy="dp")):
        assert not set(TORCHRUN_VARIABLES) & set(os.environ)


def _loader(batch: int = 8, **how: Any) -> Any:
    return DataLoader(dataset(), batch_size=batch, **how)


def test_plan_changes_only_differing_loader_settings() -> None:
    loader = _loader(num_workers=2)
    before = dict(vars(loader))
    overrides(script_task(batch=8, workers=2))(loader)
    overrides(script_task())(loader)
    assert vars(loader) == before
    overrides(script_task(batch=32, accumulate=2, workers=0))(loader)
    assert [len(labels) for _, labels in loader] == [16] * 4
    assert (loader.num_workers, loader.batch_size) == (0, 16)


def test_workers_are_added_to_a_loader_without_workers() -> None:
    loader = _loader()
    overrides(script_task(workers=1))(loader)
    assert sum(len(labels) for _, labels in loader) == 64


def test_batch_of_a_custom_batch_sampler_is_refused() -> None:
    class Buckets(BatchSampler):
        def __init__(self) -> None:
            self.sampler = SequentialSampler(dataset())

        def __iter__(self) -> Iterator[list[int]]:
            yield [1, 2, 3]

    loader: Any = DataLoader(dataset(), batch_sampler=Buckets())
    with pytest.raises(Unsupported, match="batch sampler Buckets"):
        overrides(script_task(batch=8))(loader)


def test_batch_size_set_by_the_script_is_kept() -> None:
    loader: Any = DataLoader(dataset(), batch_sampler=[[1, 2, 3], [4]])
    own = dataclasses.replace(
        script_task(batch=3), replay_hints=ReplayHints(script_sets_batch_size=True)
    )
    overrides(own)(loader)
    assert [len(labels) for _, labels in loader] == [3, 1]


def test_rank_loads_the_samples_of_another_rank() -> None:
    sampler: Any = DistributedSampler(dataset(), num_replicas=2, rank=0, shuffle=False)
    task = script_task(Variant(data_shares=(1, 0)), world_size=2)
    overrides(task)(_loader(sampler=sampler))
    assert next(iter(sampler)) == 1
    with pytest.raises(Unsupported, match="SequentialSampler"):
        overrides(task)(_loader())


def test_training_gets_the_batch_size_of_the_plan() -> None:
    def training() -> None:
        module = model()
        loop(_loader(), module, torch.optim.SGD(module.parameters(), lr=0.1))

    found = instrumented(training, script_task(batch=16))
    assert found.samples is not None
    assert {window.samples / window.steps for window in found.samples.windows} == {16}
    assert found.profile.loader is not None
    assert (found.profile.loader.batch_size, found.profile.loader.batches_per_epoch) == (16, 4)


WITHOUT_WAITING = Variant(host_syncs=False)


def test_last_host_read_is_repeated() -> None:
    unwaited, values = HostReads(ActiveVariant(script_task(WITHOUT_WAITING))), iter([1.0, 2.0, 3.0])
    tensor = torch.ones(1)

    def read() -> Any:
        return unwaited.last_value(("a line",), lambda _: next(values), tensor)

    assert [read(), read()] == [1.0, 2.0]
    unwaited.end_warm_up()
    assert [read(), read()] == [2.0, 2.0]
    assert unwaited.last_value(("another",), lambda _: next(values), tensor) == 3.0


def test_integer_reads_are_kept_per_batch() -> None:
    """A length of a sequence is a size of what is computed next; a loss is none."""
    batch: list[int | None] = [None]
    unwaited = HostReads(ActiveVariant(script_task(WITHOUT_WAITING)), lambda: batch[0])
    patches, real = Patches(), torch.Tensor.item
    patches.put(torch.Tensor, "item", lambda _usual: lambda one: real(one._host))
    unwaited.install(patches)

    def read(number: float) -> Any:
        there: Any = torch.zeros(1, dtype=torch.tensor(number).dtype, device="meta")
        there._host = torch.tensor(number)
        return there.item()

    def reads(*numbers: float) -> list[Any]:
        found = []
        for place, number in enumerate(numbers):
            batch[0] = place % 2
            found.append(read(number))
        return found

    try:
        unwaited.end_warm_up()
        assert reads(5, 7, 6, 8) == [5, 7, 5, 7]
        assert reads(0.5, 0.25, 0.125) == [0.5, 0.5, 0.5]
    finally:
        patches.undo()


class OnDevice(torch.Tensor):
    """A tensor of the host that says that it is on another device."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda")


def test_losses_are_compared_by_real_reads() -> None:
    patches, losses = Patches(), LossLog()
    unwaited = HostReads(ActiveVariant(script_task(WITHOUT_WAITING)))
    unwaited.install(patches)
    try:
        unwaited.end_warm_up()
        read = []
        for step in range(3):
            loss = torch.tensor(0.5**step).as_subclass(OnDevice)
            losses.add(step, loss)
            read.append(float(loss))
        assert read == [1.0, 1.0, 1.0]
        assert losses.means() == ((1, 1.0), (2, 0.5), (3, 0.25))
    finally:
        patches.undo()


def test_repeated_read_returns_a_new_list() -> None:
    unwaited, tensor = HostReads(ActiveVariant(script_task(WITHOUT_WAITING))), torch.ones(2)
    unwaited.end_warm_up()
    for _ in range(2):
        read = unwaited.last_value(("a line",), torch.Tensor.tolist, tensor)
        assert read == [1.0, 1.0]
        read.append(2.0)


def _frame_in(module: str) -> FrameType:
    """A frame of a function of that module, called from here."""
    code = compile("import sys\ndef here(): return sys._getframe()", "made.py", "exec")
    names: dict[str, Any] = {"__name__": module}
    exec(code, names)
    frame: FrameType = names["here"]()
    return frame


def test_reading_frame_depends_on_the_module() -> None:
    own, prints = _frame_in("__main__"), _frame_in("torch._tensor")
    assert reading_frame(own) is own
    found = reading_frame(prints)
    assert found is not None
    assert found.f_globals["__name__"] == __name__
    assert reading_frame(_frame_in("torch.amp.grad_scaler")) is None
    assert reading_frame(_frame_in("nfold.instrument.loss_log")) is None
    assert is_nfold_frame(_frame_in("nfold.engines.torch.devices"))
    assert not is_nfold_frame(own)


def test_synchronize_does_nothing_after_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[int] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: waited.append(1))
    patches, unwaited = Patches(), HostReads(ActiveVariant(script_task(WITHOUT_WAITING)))
    unwaited.install(patches)
    try:
        torch.cuda.synchronize()
        unwaited.end_warm_up()
        torch.cuda.synchronize()
        assert torch.ones(1).item() == 1
    finally:
        patches.undo()
    assert waited == [1]


def test_copies_between_host_and_device_are_counted() -> None:
    tally, here = EventCounter(), torch.zeros(4)
    there = torch.zeros(4, device="meta")
    runtime_hooks.record_copy(tally, here, there)
    tally.enabled = True
    runtime_hooks.record_copy(tally, here, there)
    runtime_hooks.record_copy(tally, there, here)
    runtime_hooks.record_copy(tally, here, here)
    assert dict(tally.counts) == {runtime_hooks.COPY: 1, runtime_hooks.HOST_SYNC: 1}
    assert tally.bytes[runtime_hooks.COPY] == 16
    assert {kind for kind, _ in tally.source_locations(1)} == {"copy", "host_sync"}


def _seen_order(change: Callable[[torch.Tensor], torch.Tensor]) -> EventCounter:
    tally, patches = EventCounter(), Patches()
    images = torch.zeros(4, 8, 2, 2)
    runtime_hooks.install_tensor_hooks(patches, tally, lambda _: None)
    tally.enabled = True
    try:
        change(images)
    finally:
        patches.undo()
    return tally


@pytest.mark.parametrize(
    "change",
    [
        lambda images: images.permute(0, 2, 3, 1).contiguous(),
        lambda images: images.permute(0, 2, 3, 1).reshape(16, 8),
        lambda images: images.permute(0, 2, 3, 1).flatten(1),
        lambda images: images.to(memory_format=torch.channels_last),
        lambda images: images.contiguous(memory_format=torch.channels_last),
    ],
)
def test_layout_copies_have_the_user_line(change: Any) -> None:
    ((kind, (place,)),) = _seen_order(change).source_locations(1)
    assert (kind, place.package_line) == ("order on cpu", None)
    assert place.line.partition(":")[0].endswith("test_script_hooks.py")


@pytest.mark.parametrize(
    "change",
    [
        lambda images: nn.TransformerEncoderLayer(8, 2, 8)(images[0].permute(2, 1, 0)),
        lambda images: images.transpose(1, 2).contiguous(),
        lambda images: images.transpose(1, 2).reshape(4, 2, 16),
    ],
)
def test_heads_of_an_attention_keep_the_format(change: Any) -> None:
    assert not list(_seen_order(change).source_locations(1))


def test_layout_copy_inside_pytorch_in_any_folder_has_the_calling_line() -> None:
    module: dict[str, Any] = {"__name__": "torch.nn.functional"}
    source = "def attention(x):\n    return x.permute(0, 2, 3, 1).contiguous()\n"
    exec(compile(source, "/opt/pytorch/torch/nn/functional.py", "exec"), module)
    ((_, (place,)),) = _seen_order(lambda x: module["attention"](x)).source_locations(1)
    assert place.line.partition(":")[0].endswith("test_script_hooks.py")
    assert place.package_line == "torch/nn/functional.py:2"


@pytest.mark.parametrize(
    "change",
    [
        lambda images: images.contiguous(),
        lambda images: images.permute(0, 2, 3, 1).double(),
        lambda images: images.reshape(4, 32).flatten(),
        lambda images: images[:, ::2].contiguous(),
        lambda images: images[0, 0].T.contiguous(),
    ],
)
def test_lines_that_keep_the_layout_are_not_recorded(change: Any) -> None:
    assert not dict(_seen_order(change).source_locations(1))


def _distributed(collected: list[Any], **how: Any) -> None:
    module = DistributedDataParallel(model(), **how)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    gathered = [torch.zeros(2)]
    while True:
        for samples, labels in _loader():
            module(samples).sum().backward()
            optimizer.step()
            mean = labels.float().mean()
            dist.all_reduce(mean)
            dist.all_gather(gathered, torch.ones(2))
            collected.append(gathered[0].tolist())


@pytest.mark.usefixtures("group")
def test_ddp_and_collectives_are_recorded() -> None:
    found = instrumented(lambda: _distributed([], find_unused_parameters=True), script_task())
    seen = found.profile
    assert (seen.parallel, seen.process_group, seen.backend) == ("ddp", True, "gloo")
    assert (seen.find_unused_parameters, seen.broadcast_buffers, seen.buffers) == (True, True, 3)
    assert seen.unused_parameter_bytes == 0
    assert {c.name: (c.per_step, c.bytes_per_step) for c in seen.collectives} == {
        "all_reduce": (1.0, 4.0),
        "all_gather": (1.0, 8.0),
    }
    assert sum(seen.bucket_bytes) == seen.parameter_bytes
    assert str(seen.most_frequent_line("wrapper")).startswith("tests/unit/instrument/hooks/")
    assert len(seen.source_locations["collective"]) == 2


def _convolved(made: list[nn.Conv2d], *, wrapped: bool = False) -> None:
    module = nn.Sequential(nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, 3, 2), nn.Flatten())
    whole = nn.Sequential(module, nn.Linear(3, 4))
    made.append(typing.cast(nn.Conv2d, module[1]))
    net: nn.Module = DistributedDataParallel(module=whole) if wrapped else whole
    loop(_loader(), net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("last", [False, True])
def test_convolution_weights_have_the_layout_of_the_variant(*, wrapped: bool, last: bool) -> None:
    made: list[nn.Conv2d] = []
    usual = torch.optim.Optimizer.add_param_group
    left_out = script_task(Variant(channels_last=last))
    found = instrumented(lambda: _convolved(made, wrapped=wrapped), left_out)
    assert found.samples is not None
    assert found.profile.convolutions == 1
    weight = made[0].weight
    assert weight.grad is not None
    for tensor in (weight, weight.grad):
        assert tensor.is_contiguous(memory_format=torch.channels_last) == last
    assert torch.optim.Optimizer.add_param_group is usual


class HalfUsed(nn.Module):
    """Of its two layers, the second is never asked."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.used(samples.flatten(1)[:, :8])
        return found


def _half_used() -> None:
    module = DistributedDataParallel(HalfUsed(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    loop(_loader(), module, optimizer)


@pytest.mark.usefixtures("group")
def test_unused_parameters_are_counted() -> None:
    assert instrumented(_half_used, script_task()).profile.unused_parameter_bytes == 4 * (8 * 4 + 4)


@pytest.mark.usefixtures("group")
def test_variant_disables_find_unused_parameters() -> None:
    left_out = script_task(Variant(find_unused_parameters=False))
    found = instrumented(lambda: _distributed([], find_unused_parameters=True), left_out)
    assert found.samples is not None
    assert not found.profile.find_unused_parameters


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("exchange", ["none", "barrier"])
def test_without_exchange_each_rank_keeps_its_part(
    exchange: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    usual = DistributedDataParallel.__init__

    def noted(module: Any, *args: Any, **kwargs: Any) -> None:
        usual(module, *args, **kwargs)
        made.append(module)

    monkeypatch.setattr(DistributedDataParallel, "__init__", noted)
    gathered: list[Any] = []
    found = instrumented(
        lambda: _distributed(gathered, find_unused_parameters=True),
        script_task(Variant(exchange=exchange, broadcast_buffers=False)),
    )
    assert found.samples is not None
    assert gathered[-1] == [1.0, 1.0]
    assert not found.profile.broadcast_buffers
    assert (made[0].process_group is dist.group.WORLD) == (exchange == "barrier")


@pytest.mark.usefixtures("group")
def test_sharded_parameters_refuse_no_exchange() -> None:
    def training() -> None:
        module: Any = nn.Linear(8, 4)
        fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
        loop(_loader(), module, torch.optim.SGD(module.parameters(), lr=0.1))

    found = instrumented(training, script_task())
    assert found.profile.parallel == "fsdp"
    assert found.samples is not None
    assert found.samples.parameter_checksum is None
    with pytest.raises(Unsupported, match="sharded"):
        instrumented(training, script_task(Variant(exchange="barrier")))


def test_data_parallel_on_cpu_has_no_device() -> None:
    def training() -> None:
        module = DataParallel(model())
        loop(_loader(), module, torch.optim.SGD(module.parameters(), lr=0.1))

    seen = instrumented(training, script_task()).profile
    assert (seen.parallel, seen.dp_devices, seen.device) == ("dp", 0, "cpu")


def test_sync_batch_norm_can_be_local() -> None:
    def training() -> None:
        module = model()
        module[1] = nn.SyncBatchNorm(16)
        loop(_loader(), module, torch.optim.SGD(module.parameters(), lr=0.1))

    found = instrumented(training, script_task(Variant(synchronised_batch_norm=False)))
    assert found.profile.synchronised_batch_norms == 1
    assert found.samples is not None


def test_child_processes_are_counted_without_workers() -> None:
    def training() -> None:
        child = multiprocessing.get_context("fork").Process(target=print)
        child.start()
        child.join()
        loop(_loader(num_workers=1), model(), epochs=1)

    assert instrumented(training, script_task()).profile.child_processes == 1
