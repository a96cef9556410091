"""Steps of a training that nobody changed: counted, timed, ended."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, SequentialSampler

from instrumented import (
    FakeClock,
    RecordingObserver,
    dataset,
    install_fake_clock,
    instrumented,
    loop,
    model,
    reset_compiler,
    script_task,
    train_with_scaler,
    usual,
)
from nfold.core.errors import Unsupported
from nfold.core.measurement import EpochGap
from nfold.core.variant import Variant
from nfold.engines.base import Phase
from nfold.engines.torch.devices import Devices
from nfold.explain.design import SHORT_EPOCHS, Trial, over_short_epochs
from nfold.instrument import epoch_boundaries, run_length, session
from nfold.instrument.hooks.patches import TrainerDetector
from nfold.instrument.rank_environment import AffinityHook


def test_run_ends_after_its_steps() -> None:
    found = instrumented(usual, script_task())
    assert found.samples is not None
    assert len(found.samples.step_ms) == 10
    assert sum(window.steps for window in found.samples.windows) == 10
    assert sum(window.samples for window in found.samples.windows) == 80
    assert [step for step, _ in found.samples.losses] == [*range(1, len(found.samples.losses) + 1)]
    assert found.samples.first_step_ms is not None
    assert found.samples.parameter_checksum is not None
    assert (
        found.profile.steps,
        found.profile.samples_per_step,
        found.profile.global_batch_size,
    ) == (
        10,
        8,
        8,
    )


def test_all_patches_are_undone() -> None:
    before = (DataLoader.__iter__, DataLoader.__init__, torch.Tensor.item, torch.Tensor.to)
    own = [name in vars(torch.Tensor) for name in ("item", "to")]
    instrumented(usual, script_task())
    assert (DataLoader.__iter__, DataLoader.__init__, torch.Tensor.item, torch.Tensor.to) == before
    assert [name in vars(torch.Tensor) for name in ("item", "to")] == own


@pytest.mark.parametrize(("host_syncs", "reads"), [(True, 14), (False, 3)])
def test_host_reads_do_not_wait_after_the_warm_up(
    host_syncs: bool, reads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual_item, made, there = torch.Tensor.item, [], torch.zeros((), device="meta")

    def item(tensor: torch.Tensor) -> Any:
        if tensor.device.type != "meta":
            return usual_item(tensor)
        made.append(tensor)
        return 0.0

    def reading() -> None:
        module = model()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(3):
            for samples, _ in DataLoader(dataset(), batch_size=8):
                module(samples).sum().backward()
                assert there.item() == 0.0
                optimizer.step()

    monkeypatch.setattr(torch.Tensor, "item", item)
    instrumented(reading, script_task(Variant(host_syncs=host_syncs)))
    assert len(made) == reads


def test_end_of_the_warm_up_keeps_other_patches() -> None:
    asked = script_task(
        Variant(host_syncs=False, threads=1, broadcast_buffers=False, exchange="none")
    )
    own = [(torch.Tensor, "item"), (torch.cuda, "synchronize"), (torch, "set_num_threads")]
    before = [getattr(*place) for place in own]
    found = session.InstrumentedRun(asked, RecordingObserver(), TrainerDetector(1), AffinityHook())
    found.install()
    found._warm_up_patches.undo()
    during = [getattr(*place) for place in own]
    found.uninstall()
    assert not any(now is usual for now, usual in zip(during, before, strict=True))
    assert [getattr(*place) for place in own] == before


def test_script_that_ends_early_is_measured() -> None:
    found = instrumented(lambda: usual(epochs=1), script_task(steps=100))
    assert found.samples is not None
    assert len(found.samples.step_ms) == 8 - found.samples.warmup_steps
    assert found.samples.parameter_checksum is not None
    assert found.samples.parameter_count == sum(p.numel() for p in model().parameters())


def test_accumulated_step_has_all_samples() -> None:
    found = instrumented(lambda: usual(accumulate=2), script_task())
    assert found.samples is not None
    assert sum(window.samples for window in found.samples.windows) == 10 * 16
    assert (found.profile.accumulation, found.profile.global_batch_size) == (2, 16)


def test_two_optimizers_make_one_step() -> None:
    def adversarial() -> None:
        one, other = nn.Linear(8, 4), model()
        loader = DataLoader(dataset(), batch_size=8)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (one, other)]
        loop(loader, other, *optimizers)

    found = instrumented(adversarial, script_task())
    assert found.samples is not None
    assert sum(window.samples for window in found.samples.windows) == 80
    assert (found.profile.optimizers, found.profile.step_optimizer) == (("SGD", "SGD"), 1)
    trained = [*nn.Linear(8, 4).parameters(), *model().parameters()]
    assert found.profile.parameter_count == sum(parameter.numel() for parameter in trained)


def _stepping(optimizer: torch.optim.Optimizer, _: torch.Tensor) -> None:
    optimizer.step()
    optimizer.zero_grad()


def test_optimizers_inside_a_backward_end_a_step_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One for each parameter, as soon as its gradient is there; a profiler ends with the step."""
    graphs: list[int] = []
    stepped = session.InstrumentedRun.on_optimizer_step

    def on_optimizer_step(one: session.InstrumentedRun, optimizer: Any) -> None:
        graphs.append(torch._C._current_graph_task_id())
        stepped(one, optimizer)

    def training() -> None:
        module = model()
        for parameter in module.parameters():
            own = torch.optim.SGD([parameter], lr=0.1)
            hook = functools.partial(_stepping, own)
            parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        loop(DataLoader(dataset(), 8), module)

    monkeypatch.setattr(session.InstrumentedRun, "on_optimizer_step", on_optimizer_step)
    found = instrumented(training, script_task(Variant(profiler_steps=True)))
    assert found.samples is not None
    assert set(graphs) == {-1}
    assert len(found.samples.step_ms) == 10
    assert sum(window.samples for window in found.samples.windows) == 80
    assert found.profile.parameter_count == sum(p.numel() for p in model().parameters())
    assert found.profile.trace is not None
    assert found.profile.steps_in_backward
    assert "torch" in found.profile.loaded_libraries.modules


def test_backward_is_no_step_with_an_optimizer() -> None:
    def training() -> None:
        for samples, _ in [*DataLoader(dataset(), 8)][:2]:
            nn.Linear(8, 4)(samples).sum().backward()
        usual(accumulate=4)

    found = instrumented(training, script_task())
    assert found.samples is not None
    assert (found.profile.has_no_optimizer, found.profile.accumulation) == (False, 4)
    assert not found.profile.steps_in_backward


def test_skipped_scaler_step_is_a_step() -> None:
    found = instrumented(train_with_scaler, script_task())
    assert found.samples is not None
    assert len(found.samples.step_ms) == 10
    assert found.profile.skipped_steps == 7


def test_evaluation_is_in_no_window() -> None:
    evaluated: list[int] = []

    def evaluate() -> None:
        evaluated.extend(len(batch) for batch, _ in DataLoader(dataset(32), batch_size=32))

    found = instrumented(lambda: usual(after_epoch=evaluate), script_task(steps=20))
    assert evaluated
    assert found.samples is not None
    assert sum(window.samples for window in found.samples.windows) == 160
    assert Phase.EVALUATING in found.phases


@pytest.fixture
def nothing_compiled() -> Iterator[None]:
    """PyTorch's compiler as in a new process, before a test and after it."""
    reset_compiler()
    yield
    reset_compiler()


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize(("wanted", "firsts"), [(None, 1), (Variant(compiled="default"), 2)])
def test_compiling_step_has_the_limit_of_the_first(
    wanted: Variant | None, firsts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script's model is compiled in its second call, here by what needs no compiler."""
    compiled, real = [], torch.compile

    def compile_eagerly(function: Any, mode: str) -> Any:
        compiled.append(mode)
        return real(function, backend="eager")

    monkeypatch.setattr(torch, "compile", compile_eagerly)
    found = instrumented(lambda: usual(samples=160), script_task(wanted))
    assert compiled == ["default"] * (firsts - 1)
    changes = [phase for phase, _ in itertools.groupby(found.phases)]
    assert changes == [Phase.FIRST_STEP, Phase.STEPPING] * firsts
    assert found.samples is not None
    assert len(found.samples.step_ms) == 10


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    return install_fake_clock(monkeypatch)


def _taking_a_second(seconds: FakeClock) -> nn.Module:
    module = model()
    module.register_forward_hook(lambda *_: seconds.advance(1))
    return module


@pytest.mark.parametrize("looks", [False, True])
@pytest.mark.parametrize("length", [{"steps": None, "epochs": 3}, {"steps": 19}])
def test_epoch_boundary_is_in_no_window(length: Any, looks: bool, seconds: FakeClock) -> None:
    """Passes of 8 steps of a second; of whole epochs also what follows the last.

    Some scripts look at a first batch before they begin: that pass is none.
    """

    def training() -> None:
        module, loader = _taking_a_second(seconds), _loader()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

        def between() -> None:
            seconds.advance(100)
            if looks:
                next(iter(loader))

        if looks:
            next(iter(loader))
        loop(loader, module, optimizer, after_epoch=between)

    found = instrumented(training, script_task(warmup_steps=3, **length)).samples
    assert found is not None
    steps = 21 if found.epochs else 19
    assert found.step_ms == (1000,) * steps
    assert sum(window.samples for window in found.windows) == 8 * steps
    assert sum(window.seconds for window in found.windows) == steps
    if found.epochs:
        assert [epoch.samples for epoch in found.epochs] == [64, 64, 64]
        assert [epoch.train_loss for epoch in found.epochs] == [None] * 3
        assert [epoch.seconds for epoch in found.epochs] == [108, 108, 108]
    else:
        between = [window.epoch_gap for window in found.windows if window.epoch_gap]
        assert between == [EpochGap(seconds=100, steps=8)] * 2


@pytest.mark.parametrize(("between_s", "passes"), [(3, 3), (100, 1)])
def test_boundaries_of_truncated_passes_are_scaled(
    between_s: float, passes: int, seconds: FakeClock
) -> None:
    """Of 8 steps each pass makes 2; what lies between two lies on 8 steps. Long ones are one."""

    def training() -> None:
        module = _taking_a_second(seconds)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        loop(_loader(), module, optimizer, after_epoch=lambda: seconds.advance(between_s))

    task = script_task(Variant(batches_per_epoch=2), warmup_steps=2, steps=6)
    found = instrumented(training, task).samples
    assert found is not None
    between = [window.epoch_gap for window in found.windows if window.epoch_gap]
    assert between == [EpochGap(seconds=between_s, steps=8)] * passes
    assert found.step_ms == (1000,) * (2 * passes)


@pytest.mark.parametrize("every", [5, 10, 20])
def test_work_after_some_steps_within_truncated_passes(every: int, seconds: FakeClock) -> None:
    """It is told as what recurs; counted with the end of a pass, it would be told twice."""
    short = over_short_epochs(Trial(plan=script_task(steps=1).plan))

    def training() -> None:
        module, made = _taking_a_second(seconds), itertools.count(1)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        loader = DataLoader(dataset(800), batch_size=8)
        while True:
            for samples, _ in loader:
                module(samples).sum().backward()
                optimizer.step()
                seconds.advance(3 if next(made) % every == 0 else 0)
            seconds.advance(1)

    changes: dict[str, Any] = {"warmup_steps": short.plan.warmup_steps, "steps": short.plan.steps}
    found = instrumented(training, script_task(short.variant, **changes)).samples
    assert found is not None
    between = [window.epoch_gap for window in found.windows if window.epoch_gap]
    assert between == [EpochGap(seconds=1, steps=100)] * SHORT_EPOCHS


@pytest.mark.parametrize("input_", ["real", "replayed"])
@pytest.mark.parametrize(("between_s", "ends"), [(100, 2), (3, 3), (1, 9), (0, 12)])
def test_passes_repeat_after_long_boundaries(
    between_s: float, ends: int, input_: Any, seconds: FakeClock
) -> None:
    """Passes of 8 steps in a run of 104; counted are 5 s after 1, 2, 4 and 8 of them."""
    ended: list[bool] = []

    def evaluate() -> None:
        ended.append(True)
        seconds.advance(between_s)

    def training() -> None:
        module = _taking_a_second(seconds)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        loop(_loader(), module, optimizer, after_epoch=evaluate)

    found = instrumented(training, script_task(Variant(input=input_), steps=100)).samples
    assert found is not None
    assert len(ended) == ends
    assert found.step_ms == (1000,) * 100
    between = [window.epoch_gap for window in found.windows if window.epoch_gap]
    assert [one.seconds for one in between] == pytest.approx([between_s] * ends)


class Store:
    """Rank 0's word, which is there after a while."""

    def __init__(self, word: str, after: int) -> None:
        self._word, self._left = word, after

    def check(self, keys: list[str]) -> bool:
        self._left -= 1
        return self._left < 0

    def get(self, key: str) -> bytes:
        return self._word.encode()


@pytest.mark.parametrize("word", ["True", "False"])
def test_rank_reports_progress_while_it_waits_for_rank_0(
    word: str, seconds: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[bool] = []
    monkeypatch.setattr(run_length, "has_process_group", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    store = Store(word, after=3)
    monkeypatch.setattr(run_length, "_decision_store", lambda: store)
    task = script_task(Variant(batches_per_epoch=5), warmup_steps=5, steps=15)
    one = epoch_boundaries.EpochGapLimit(task, lambda: None, lambda: waited.append(True))
    assert [one.ends_run(step) for step in range(1, 11)] == [False] * 9 + [word == "True"]
    assert len(waited) == 3


LOOK = Variant(profiler_steps=True)


@pytest.mark.parametrize(
    ("taking_s", "left_out", "warmup", "timed", "traced"),
    [(1, LOOK, 7, 3, 2), (0, LOOK, 10, 12, 6), (1, Variant(), 10, 12, None)],
)
def test_probe_run_is_short_with_long_steps(
    taking_s: int,
    left_out: Variant,
    warmup: int,
    timed: int,
    traced: int | None,
    seconds: FakeClock,
) -> None:
    steps = itertools.count()

    def slow(*_: object) -> None:
        """But for a second step that takes a minute, as one that compiles again may."""
        seconds.advance(60 if next(steps) == 1 else taking_s)

    def training() -> None:
        module = model()
        module.register_forward_hook(slow)
        loop(_loader(), module, torch.optim.SGD(module.parameters(), lr=0.1))

    found = instrumented(training, script_task(left_out, steps=12, warmup_steps=10))
    assert found.samples is not None
    assert found.samples.warmup_steps == warmup
    assert found.samples.step_ms == (taking_s * 1000,) * timed
    assert (found.profile.trace.steps if found.profile.trace else None) == traced
    assert found.profile.samples_per_step == 8


def test_probe_of_ranks_without_a_group_ends_early(seconds: FakeClock) -> None:
    task = script_task(LOOK, world_size=2, steps=100, warmup_steps=10)
    found = instrumented(usual, task)
    assert found.samples is not None
    assert (len(found.samples.step_ms), found.profile.trace) == (1, None)
    assert not found.profile.process_group


@pytest.mark.parametrize("slow", [True, False])
def test_ranks_agree_on_the_length_of_a_probe(
    slow: bool, seconds: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (run_length, run_length):
        monkeypatch.setattr(module, "has_process_group", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(run_length, "_decision_store", lambda: Store(str(slow), after=3))
    task = script_task(LOOK, world_size=2, steps=100, warmup_steps=10)
    look = run_length.ProbeRun(task, lambda: None)
    found = [look.shortened_length(step, Devices((torch.device("cpu"),))) for step in range(1, 9)]
    assert [one is not None for one in found] == [slow and step == 6 for step in range(1, 9)]


@pytest.mark.parametrize(("workers", "step_ms"), [(0, 2000), (1, 1000)])
def test_pass_start_belongs_to_a_step_without_workers(
    workers: int, step_ms: float, seconds: FakeClock
) -> None:
    class Beginning(SequentialSampler):
        def __iter__(self) -> Any:
            seconds.advance(1)
            return super().__iter__()

    def training() -> None:
        module, data = _taking_a_second(seconds), dataset(8)
        loader = DataLoader(data, batch_size=8, sampler=Beginning(data), num_workers=workers)
        loop(loader, module, torch.optim.SGD(module.parameters(), lr=0.1))

    found = instrumented(training, script_task(steps=3, warmup_steps=2)).samples
    assert found is not None
    assert found.step_ms == (step_ms,) * 3
    between = [window.epoch_gap for window in found.windows if window.epoch_gap]
    waited_s = 1.0 if workers else 0.0
    assert between == [EpochGap(seconds=waited_s, steps=1, waited_s=waited_s)] * len(between)
    assert between


def test_pass_ends_when_the_next_begins() -> None:
    def training() -> None:
        module, loader = model(), _loader()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        while True:
            batches = iter(loader)
            for _ in range(len(loader)):
                module(next(batches)[0]).sum().backward()
                optimizer.step()

    found = instrumented(training, script_task(steps=None, epochs=3, warmup_steps=3))
    assert found.samples is not None
    assert [epoch.samples for epoch in found.samples.epochs] == [64, 64, 64]
    assert found.profile.epochs_completed == 3


def test_last_epoch_ends_with_the_script() -> None:
    found = instrumented(lambda: usual(epochs=2), script_task(steps=None, epochs=5, warmup_steps=3))
    assert found.samples is not None
    assert len(found.samples.epochs) == 2


def _loader() -> Any:
    return DataLoader(dataset(), batch_size=8)


def _no_loader(pieces: int = 12) -> None:
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(pieces * 2):
        module(torch.randn(6, 8)).sum().backward()
        optimizer.step()


def test_model_calls_count_samples_without_a_loader() -> None:
    found = instrumented(_no_loader, script_task())
    assert found.samples is not None
    assert sum(window.samples for window in found.samples.windows) == 60
    assert found.profile.loader is None
    assert found.profile.global_batch_size is None
    assert found.samples.sample_hashes == ()


def test_keyword_inputs_of_a_model_are_counted() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 4)

        def forward(self, *, scale: float, samples: torch.Tensor) -> Any:
            return scale * self.inner(samples)

    def training() -> None:
        module = Named()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(24):
            module(scale=2.0, samples=torch.randn(6, 8)).sum().backward()
            optimizer.step()

    found = instrumented(training, script_task()).samples
    assert found is not None
    assert sum(window.samples for window in found.windows) == 60


def test_replay_without_a_loader_is_refused() -> None:
    with pytest.raises(Unsupported, match="cannot be replayed"):
        instrumented(_no_loader, script_task(Variant(input="replayed")))


def test_missing_slot_does_not_refuse_the_run() -> None:
    """Of turns with real and with replayed batches the script ends in the first."""

    def training() -> None:
        module = model()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        loop(DataLoader(dataset(56), batch_size=8), module, optimizer, epochs=1)

    turns = (Variant(), Variant(input="replayed"))
    found = instrumented(
        training, dataclasses.replace(script_task(), interleaved_variants=turns)
    ).samples
    assert found is not None
    assert set(found.slots) == {0}
    with pytest.raises(Unsupported, match="cannot be replayed"):
        instrumented(_no_loader, dataclasses.replace(script_task(), interleaved_variants=turns))


def test_hashes_of_equal_and_other_samples() -> None:
    def hashes(first: int) -> Any:
        def training() -> None:
            module = model()
            part = torch.utils.data.Subset(dataset(64), range(first, first + 32))
            loop(
                DataLoader(part, batch_size=8),
                module,
                torch.optim.SGD(module.parameters(), lr=0.1),
            )

        samples = instrumented(training, script_task()).samples
        return samples.sample_hashes if samples else None

    assert hashes(0) == hashes(0)
    assert hashes(0) != hashes(32)


def test_refusal_survives_a_script_that_catches_it() -> None:
    def stubborn() -> None:
        module = model()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(3):
            with suppress(Exception):
                loop(DataLoader(dataset(), batch_size=None), module, optimizer)

    with pytest.raises(Unsupported, match="batch size 16 per rank"):
        instrumented(stubborn, script_task(batch=16))
