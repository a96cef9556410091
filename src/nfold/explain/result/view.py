"""What an explanation shows first: a pure function from the Budget to a page of short texts.

The terminal, the Markdown file and the HTML page print the same view in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from nfold.core.format import join_words, pluralize
from nfold.core.stats import Interval
from nfold.explain.result.budget import (
    EXCHANGE_REPAIR,
    MIN_STEP_FRACTION,
    SHARED_CORES,
    STARVED_FRACTION,
    WAITING,
    AccountRow,
    Budget,
    Change,
    StepAccount,
    lacked_time,
)

Tone = Literal["costly", "healthy", "unknown", "wrong"]
FIRST_EPOCH, GROWING_WORK = "first-epoch", "growing-work"
MAX_SHOWN_SPREAD = 10  # times the value; wider intervals say nothing
UNCERTAIN_FRACTION = 0.15
"""Half the width of an interval over its value: wider intervals are printed."""
NOISE_FRACTION = 0.2
"""Of the step: noise that can hide this much forbids the word healthy."""
CAVEAT_NAMES = {
    "busy_device": "other processes use a device",
    "busy_host": "other processes use {value:.1f} cores of this host",
    "changing_batches": "batches change during training",
    "drift": "step time drifts",
    "ended_early": "the script ended early",
    "few_repeats": "few repeats",
    "many_threads": "more threads than cores",
    "not_undone": "the sandbox could not undo a write",
    "overtaken": "another library is faster on one device",
    "own_orders": "every rank visits all samples",
    "power_capped": "devices at their power limit",
    "processes_left": "the script left processes running",
    "rounded_apart": "ranks round differently",
    "short_steps": "short steps, nfold's own cost shows",
    "telemetry_missing": "no telemetry",
    "throttled": "throttled devices",
    "uneven_batches": "ranks may have unequal batches",
    "unsteady": "step time drifts on this host",
}
CAUSE_NAMES = {
    "launch-bound": "launch overhead",
    "link": "gradient bytes",
    "network": "network",
    "threads": "host contention",
    "epoch-boundary": "epoch boundary",
    "layout": "memory layout",
    "copies": "host-to-device copies",
    "input": "data loader",
    "single-process": "one process per device",
    "growing-work": "work that grows with devices",
}
MINOR_FRACTION = 0.05  # of the cost of the first epoch: the rest of the input costs something
MAX_TOGETHER = 3  # costs within the noise
MOST_FRACTION = 0.75  # of what is not attributed
MIN_SHOWN_FRACTION = 0.005  # of the step
MIN_LINE_FRACTION = 0.2  # of the time of a batch
BUDGETS_S = (180, 600, 1800, 3600)
# Caveats that stand below the headline: of most only the author knows whether they are faults.
TO_CHECK = (
    "augmented_copies",
    EXCHANGE_REPAIR,
    GROWING_WORK,
    "recompilation",
    "same_random_numbers",
    SHARED_CORES,
    "unequal_epochs",
    "whole_data",
)
NOT_UNCERTAIN = ("would_have_written", *TO_CHECK)


@dataclass(frozen=True, kw_only=True)
class Previous:
    """An earlier explanation of the same script, before it was edited."""

    samples_per_s: float
    devices: int
    explained_at: str = ""


@dataclass(frozen=True, kw_only=True)
class ViewRow:
    """A row of the account.

    ``note`` is ``next`` for the cost to look at after the first, and ``probably`` for one that is not
    certain while the first is.
    """

    label: str
    ms: Interval
    fraction: float
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class ExplanationView:
    """Texts without a layout; empty texts are not printed.

    ``change`` is what to do about the costliest row, ``more_changes`` what to do about others.
    ``alternatives`` is (head, rows), each row a label and one text per measured value. ``data_set``
    is the line of the data set that takes most of the time of a batch.
    """

    title: str
    headline: str
    tone: Tone
    notices: tuple[str, ...] = ()
    before_edit: str = ""
    change: Change | None = None
    no_change: str = ""
    more_changes: tuple[Change, ...] = ()
    gain: str = ""
    gain_basis: str = ""
    alternatives: tuple[tuple[str, ...], ...] = ()
    data_set: str = ""
    account_title: str = ""
    step_ms: float = 0.0
    rows: tuple[ViewRow, ...] = ()
    summary: str = ""
    untested: str = ""
    caveats: str = ""
    firmer: str = ""


def build_view(
    budget: Budget, previous: Previous | None = None, budget_s: float | None = None
) -> ExplanationView:
    """The view of a finished or a preliminary budget.

    ``previous`` is the explanation before the last edit of the script, ``budget_s`` the time that
    was allowed, from which a larger one is suggested.
    """
    account = budget.account or StepAccount(step_ms=budget.n_devices.step_ms, rows=())
    headline, tone = _headline(budget, account)
    costs, costly = _lasting(account), tone == "costly"
    change = _first_change(budget, costs)
    if tone == "unknown" and _is_small(account, costs):
        change = None
    others = [one for one in budget.changes if change is not None and one.row != change.row]
    notices = [f"Wrong training: {text}." for text in budget.training_errors[1:]]
    shown = {row.id for row in costs} | ({SHARED_CORES} if costly else set())
    if not shown.isdisjoint(("communication", "synchronization")):
        shown.add(EXCHANGE_REPAIR)
    checks = (one for one in budget.caveats if one.kind in TO_CHECK and one.kind not in shown)
    notices += [f"Check: {one.text}." for one in checks]
    if _uses_one_of_several(budget):
        notices += [text for text in _one_process_sentences(budget) if text != headline]
    elif budget.multi_process_failure:
        notices.append(budget.failure_sentence)
    basis = "measured" if change is not None and change.measured else "not measured"
    return ExplanationView(
        title=_title(budget),
        headline=headline,
        tone=tone,
        notices=(*notices, *filter(None, [budget.headline])),
        before_edit=_before_edit(budget, previous),
        change=None if tone in ("healthy", "wrong") else change,
        no_change=_no_change(budget, costs) if costly and change is None else "",
        more_changes=tuple(one for one in others if _factor(one) >= 1) if costly else (),
        gain=_gain(budget, change) if costly and change is not None else "",
        gain_basis="" if change is None else basis,
        alternatives=() if change is None else _alternatives(change),
        data_set=_data_set(budget, costs),
        account_title=f"Where a step goes ({pluralize(budget.devices, 'device')})",
        step_ms=account.step_ms.value,
        rows=_rows(account),
        summary=_summary(budget, account),
        untested=_untested(budget),
        caveats=_caveats(budget),
        firmer=_firmer(budget, budget_s, tone),
    )


def _title(budget: Budget) -> str:
    """``train.py · 2 GPU devices · DDP · 64 samples per device (128 in all)``."""
    plan, devices = budget.plan, budget.devices
    batch, kind, strategy = plan.batch or 1, str(plan.device), str(plan.strategy)
    samples = f"{-(-batch // devices):,} samples per device ({batch:,} in all)"
    if devices == 1 or budget.uses_one_device:
        samples = f"{batch:,} samples per step"
    parallelism = budget.parallelism.partition(",")[0]
    if not parallelism and devices > 1:
        parallelism = {"ddp": "DDP", "dp": "one process"}.get(strategy, strategy)
    hardware = pluralize(devices, {"cpu": "CPU device", "cuda": "GPU"}.get(kind, kind))
    return " · ".join(filter(None, [budget.target, hardware, parallelism, samples]))


def format_ms(value: float) -> str:
    """Milliseconds with three significant digits: ``38.0``, ``4.52``, ``0.31``, ``1,234``."""
    size = abs(value)
    return f"{value:z,.{0 if size >= 999.95 else 1 if size >= 9.995 else 2}f}"


def format_percent(fraction: float) -> str:
    """``56 %``; below one percent ``<1 %``."""
    return "<1 %" if 0 < fraction < 0.005 else f"{100 * fraction:z.0f} %"


def format_factor(factor: Interval, *, always: bool = False) -> str:
    """``1.86x``, with its interval where it is wide: ``1.86x (1.41–2.20)``."""
    text = f"{factor.value:.2f}x"
    if factor.low is None or factor.high is None or f"{factor.low:.2f}" == f"{factor.high:.2f}":
        return text
    if factor.high > MAX_SHOWN_SPREAD * factor.value:
        return f"{text} (few repeats)"
    wide = max(factor.high - factor.value, factor.value - factor.low)
    if always or wide > UNCERTAIN_FRACTION * factor.value:
        text += f" ({factor.low:.2f}–{factor.high:.2f})"
    return text


def _headline(budget: Budget, account: StepAccount) -> tuple[str, Tone]:
    if budget.training_errors:
        return f"Wrong training: {budget.training_errors[0]}.", "wrong"
    if _uses_one_of_several(budget):
        if budget.multi_process_failure:
            return budget.failure_sentence, "wrong"
        return _one_process_sentences(budget)[0], "costly"
    bound, costs, step = budget.lower_bound, _lasting(account), account.step_ms.value
    if budget.shared_cores:
        return _shared_cores_headline(budget, costs, step), "costly"
    largest = max((row.ms.value for row in costs), default=0.0)
    if bound is not None and bound.lost_ms > max(0.02 * step, largest):
        least = "" if bound.is_complete else "more than "
        return (
            f"Every epoch ends with {least}{bound.seconds:.2g} s without a step: "
            f"{least}{format_ms(bound.lost_ms)} ms per step."
        ), "costly"
    if budget.devices_cannot_help:
        batch, factor = budget.plan.batch or 1, format_factor(budget.speedup)
        return (
            f"{budget.devices} devices are slower than one at {batch:,} samples per step: {factor}."
        ), "costly"
    rest = account.not_attributed.ms if account.rows else budget.not_attributed_ms
    if budget.is_time_missing(rest) and rest.value > largest:
        known = _observed(budget)
        if not costs and not known and (together := _cost_together(account)):
            return together, "unknown"
        if costs:
            known = f"; the largest known cost is {costs[0].label} ({format_ms(costs[0].ms.value)})"
        return f"{_of_step(rest.value, step)} are not attributed yet{known}.", "unknown"
    first = next((row for row in account.costs if row.id == FIRST_EPOCH), None)
    if first is not None and largest < MINOR_FRACTION * first.ms.value:
        return (
            "Healthy after the first epoch, in which the data set computes samples that it keeps: "
            f"{_of_step(first.ms.value, step)}."
        ), "healthy"
    if costs:
        ms, phrase = costs[0].ms, _cost_phrase(budget, costs[0])
        if costs[0].significant:
            return f"{phrase}: {_of_step(ms.value, step)}.", "costly"
        low = max(0.0, ms.low or 0.0)
        cost = f"{format_ms(ms.value)} ({format_ms(low)}–{format_ms(ms.high or 0)})"
        text = f"{phrase[0].lower()}{phrase[1:]}: {cost} of {format_ms(step)} ms per step"
        return f"Probably {text}.", "costly"
    if budget.skipped_causes:
        observed = _observed(budget) or ", but not everything was tested"
        return f"No cost found yet{observed}.", "unknown"
    if rest.high is not None and rest.high > NOISE_FRACTION * step:
        return (
            f"No cost stands out of the noise, which can hide {format_ms(rest.high)} of "
            f"{format_ms(step)} ms per step."
        ), "unknown"
    return "Healthy: nothing worth fixing.", "healthy"


def _observed(budget: Budget) -> str:
    """``; not tested: ...``: what the probe run observed, if its cost was not measured."""
    measured = {row.cause for row in budget.rows}
    kinds = {caveat.kind for caveat in budget.caveats} - measured
    if GROWING_WORK in kinds:
        return "; not tested: every rank computes for the samples of all ranks"
    if EXCHANGE_REPAIR in kinds and budget.exchange and not {"link", "synchronization"} <= measured:
        return f"; not tested: gradient communication ({budget.exchange})"
    return ""


def _cost_together(account: StepAccount) -> str:
    """Return a sentence about costs within the noise that together make most of what is missing."""
    rest_ms, rows, sum_ms = account.not_attributed.ms.value, list[str](), 0.0
    for row in sorted(account.small, key=lambda one: -one.ms.value)[:MAX_TOGETHER]:
        if sum_ms < MOST_FRACTION * rest_ms and row.ms.value > 0:
            rows.append(row.label)
            sum_ms += row.ms.value
    if len(rows) < 2 or abs(sum_ms - rest_ms) > (1 - MOST_FRACTION) * rest_ms:
        return ""
    return (
        f"Probably {join_words(rows)}: together {_of_step(sum_ms, account.step_ms.value)}; each "
        "alone is within the noise."
    )


def _shared_cores_headline(budget: Budget, costs: tuple[AccountRow, ...], step_ms: float) -> str:
    text = f"All ranks and their loader workers share {pluralize(budget.shared_cores, 'core')}"
    waits = next((row for row in costs if row.id in ("threads", "data-loader")), None)
    if waits is None:
        return f"{text}."
    what = "contention" if waits.id == "threads" else "waiting for the data loader"
    return f"{text}: {what} takes {_of_step(waits.ms.value, step_ms)}."


def _is_small(account: StepAccount, costs: tuple[AccountRow, ...]) -> bool:
    """Return whether the largest cost is less than half of what is not attributed."""
    return bool(costs) and 2 * costs[0].ms.value < account.not_attributed.ms.value


def _lasting(account: StepAccount) -> tuple[AccountRow, ...]:
    return tuple(row for row in account.costs if row.id != FIRST_EPOCH)


def _of_step(ms: float, step_ms: float) -> str:
    return f"{format_ms(ms)} of {format_ms(step_ms)} ms per step ({format_percent(ms / step_ms)})"


def _cost_phrase(budget: Budget, row: AccountRow) -> str:
    n, part = budget.devices, f" ({row.parts[0][0]})" if row.parts else ""
    phrases = {
        "data-loader": _waits_for_loader(n),
        "communication": "Gradient communication is not hidden by compute"
        + f" ({budget.exchange})" * bool(budget.exchange),
        "copies": "Host-to-device copies are not hidden by compute",
        "launch": "Fixed work per step (kernel launches) does not shrink with the batch",
        "epoch-boundary": "Time passes between epochs or between steps",
        "imbalance": "Ranks wait for the slowest rank",
        "threads": "The processes contend for the cores of the host",
        "layout": "Tensors are rearranged in memory",
        "memory": "The allocator runs out of device memory and retries",
        "recompilation": "torch.compile compiles again in every step",
        "single-process": f"One process drives all {n} devices",
        "growing-work": "Every rank computes for the samples of all ranks",
        "synchronization": f"Synchronization slows the step{part}",
    }
    return phrases[row.id]


def _waits_for_loader(devices: int) -> str:
    who = {1: "The device waits", 2: "Both devices wait"}
    return f"{who.get(devices, f'All {devices} devices wait')} for the data loader"


def describe_input_wait(wait_ms: float, step_ms: float, devices: int) -> str:
    """Return the headline of a run that waits for its data loader, before anything is compared."""
    part = _of_step(min(wait_ms, step_ms), step_ms)
    return f"{_waits_for_loader(devices)}: {part}, seen in one run."


def _uses_one_of_several(budget: Budget) -> bool:
    return budget.devices > 1 and budget.uses_one_device


def _change_of_row(budget: Budget, row: str) -> Change | None:
    return next((change for change in budget.changes if change.row == row), None)


def _one_process_sentences(budget: Budget) -> list[str]:
    """Sentences on the loss of one device and the gain of more; the first is the headline."""
    sentences = (_starved_headline(budget), _one_process_headline(budget), _needed_batch(budget))
    known = [text for text in sentences if text]
    gain = f"what {budget.devices} processes would gain was not measured"
    return known or [f"{budget.target} uses one process: {gain}."]


def _starved_headline(budget: Budget) -> str:
    found = budget.several_devices
    if found is None or not found.is_starved:
        return ""
    line = f" ({budget.fetch_lines[0].location})" if budget.fetch_lines else ""
    cost = _of_step(found.input_ms.value, found.step_ms.value)
    return f"One device waits for its data loader{line}: {cost}. Fix that first."


def _needed_batch(budget: Budget) -> str:
    """From which batch on more devices help; empty if they help already or that is unknown."""
    found, n = budget.several_devices, budget.devices
    if found is None or found.batch is None or found.exchange_ms is None or found.sample_ms is None:
        return ""
    if found.batch.value <= (budget.plan.batch or 1):
        return ""
    more = "A second device helps" if n == 2 else f"{n} devices help"
    return (
        f"{more} from about {_round(found.batch.value):,} samples per step on: an estimate from "
        f"{format_ms(found.exchange_ms.value)} ms to exchange gradients after backward and "
        f"{format_ms(1e3 * found.sample_ms.value)} µs of compute per sample, if devices neither wait "
        "for input nor slow each other."
    )


def _round(value: float) -> int:
    """Two significant digits."""
    return int(float(f"{value:.2g}"))


def _one_process_headline(budget: Budget) -> str:
    change, n = _change_of_row(budget, "single-process"), budget.devices
    uses = f"{budget.target} uses one process"
    if change is None or change.factor is None or change.samples_per_s is None:
        return ""
    factor = format_factor(change.factor)
    if change.factor.value < 1 + MIN_STEP_FRACTION:
        return f"{uses}, and {n} processes would not be faster here: {factor}."
    rate = f"{change.samples_per_s.value:,.0f} samples/s"
    return f"{uses}: {n} processes would train {factor} as fast, at up to {rate}."


def _first_change(budget: Budget, costs: tuple[AccountRow, ...]) -> Change | None:
    """The change for the costliest row; never that of another row in its place."""
    if _uses_one_of_several(budget):
        if _starved_headline(budget):
            return _change_of_row(budget, "data-loader")
        change = _change_of_row(budget, "single-process")
        worth = change is not None and _factor(change) >= 1 + MIN_STEP_FRACTION
        return change if worth else None
    if budget.shared_cores:
        return next(iter(budget.changes), None)
    bound = budget.lower_bound
    step_ms = budget.n_devices.step_ms.value
    largest = max((row.ms.value for row in costs), default=MIN_STEP_FRACTION * step_ms)
    if bound is not None and bound.lost_ms > largest:
        return Change(row="epoch-boundary", location="", code=bound.fix)
    if not costs or budget.devices_cannot_help:
        return None
    change = _change_of_row(budget, costs[0].id)
    return None if change is None or _factor(change) < 1 else change


def _factor(change: Change) -> float:
    return change.factor.value if change.factor is not None else 1.0


def _no_change(budget: Budget, costs: tuple[AccountRow, ...]) -> str:
    limit = budget.break_even_batch
    if budget.devices_cannot_help and limit is not None:
        alone = f"train on one device: {budget.one_device.samples_per_s.value:,.0f} samples/s"
        if limit.batch is None:
            return alone
        return f"a global batch above {limit.batch.value:,.0f}, or {alone}"
    return f"No change for {costs[0].label} is known to help." if costs else ""


def _gain(budget: Budget, change: Change) -> str:
    if change.factor is None or change.samples_per_s is None:
        return ""
    now, then = budget.n_devices.samples_per_s.value, change.samples_per_s.value
    at_most = "" if change.measured else "at most "
    factor = format_factor(change.factor)
    return f"{now:,.0f} → {at_most}{then:,.0f} samples/s: {factor} as fast"


def _alternatives(change: Change) -> tuple[tuple[str, ...], ...]:
    if len(change.alternatives) < 2:
        return ()
    head = (change.varied, *(one.value for one in change.alternatives))
    steps = ("ms per step", *(format_ms(one.step_ms.value) for one in change.alternatives))
    return head, steps


def _data_set(budget: Budget, costs: tuple[AccountRow, ...]) -> str:
    if not budget.fetch_lines or "data-loader" not in [row.id for row in costs[:2]]:
        return ""
    line = budget.fetch_lines[0]
    part = f"{format_percent(line.fraction)} of {format_ms(budget.fetch_ms)} ms per batch"
    return f"{line.location}   {line.code}   {part}" if line.fraction >= MIN_LINE_FRACTION else ""


def _rows(account: StepAccount) -> tuple[ViewRow, ...]:
    step, rows, rest = account.step_ms.value, [], []
    for place, row in enumerate(account.costs):
        parts = row.parts if row.id == "data-loader" else ()
        split = len(parts) == 2 and any(name == WAITING for name, _ in parts)
        note = "next" if place == 1 else ""
        if account.costs[0].significant and not row.significant:
            note = "probably"
        for label, ms in parts if split else [(row.label, row.ms)]:
            if abs(ms.value) >= MIN_SHOWN_FRACTION * step:
                rows.append(ViewRow(label=label, ms=ms, fraction=ms.value / step, note=note))
    for row in account.rows:
        shown = ViewRow(
            label=row.label if row.ms.value >= 0 else "overlap of these costs",
            ms=row.ms,
            fraction=row.ms.value / step,
        )
        if row.id == "compute":
            rows.append(shown)
        elif not row.causes and abs(row.ms.value) >= MIN_SHOWN_FRACTION * step:
            rest.append(shown)
    return (*sorted(rows, key=lambda row: -row.fraction), *rest)


def _summary(budget: Budget, account: StepAccount) -> str:
    if budget.devices == 1 or budget.training_errors:
        return ""
    if _uses_one_of_several(budget):
        return f"Now {budget.n_devices.samples_per_s.value:,.0f} samples/s in one process."
    speedup, n = budget.speedup, budget.devices
    factor, _, interval = format_factor(speedup, always=True).partition(" ")
    text = f"{n} devices are {' '.join(filter(None, [factor, 'one', interval]))}"
    if speedup.value > (1 + MIN_STEP_FRACTION) * n:
        noise = speedup.low is None or speedup.low <= n
        why = "noise" if noise else "possible only if one device is short of something they share"
        return f"{text}; more than {n}x is {why}."
    loader = next((row for row in account.costs if row.id == "data-loader"), None)
    own = loader.one_device_ms if loader is not None else None
    if own is not None and own.value > STARVED_FRACTION * account.step_ms.value:
        first = ": fix that first" if account.costs[0] is loader else ""
        return f"{text}, but one device starves too{first}."
    return f"{text}."


def _before_edit(budget: Budget, previous: Previous | None) -> str:
    if previous is None or previous.devices != budget.devices:
        return ""
    rate, before = budget.n_devices.samples_per_s, previous.samples_per_s
    noise = rate.low is not None and rate.high is not None and rate.low < before < rate.high
    return (
        f"{before:,.0f} → now {rate.value:,.0f} samples/s: {rate.value / before:.2f}x as fast as "
        f"before the edit{' (within the noise)' * noise}"
    )


def _untested(budget: Budget) -> str:
    groups: dict[str, list[str]] = {"no time left": []}
    known = {row.cause for row in (*budget.rows, *budget.one_device_rows)}
    for cause, reason in budget.unmeasured:
        if cause not in budget.not_applicable and cause not in known:
            why = "no time left" if lacked_time(reason) else "failed or impossible here"
            groups.setdefault(why, []).append(CAUSE_NAMES.get(cause, cause))
    texts = [f"{join_words(causes)} ({why})" for why, causes in groups.items() if causes]
    return f"Not tested: {', '.join(texts)}." if texts else ""


def _caveats(budget: Budget) -> str:
    names = []
    for caveat in budget.caveats:
        if caveat.kind in NOT_UNCERTAIN:
            continue
        form = CAVEAT_NAMES.get(caveat.kind, caveat.kind.replace("_", " "))
        if "{value" in form:
            form = form.format(value=caveat.value) if caveat.value is not None else "a busy host"
        names.append(form)
    return f"Uncertain: {', '.join(dict.fromkeys(names))}." if names else ""


def _firmer(budget: Budget, budget_s: float | None, tone: Tone) -> str:
    uncertain = any(caveat.kind not in NOT_UNCERTAIN for caveat in budget.caveats)
    if budget_s is None or not (uncertain or budget.skipped_causes or tone == "unknown"):
        return ""
    seconds = round(next((longer for longer in BUDGETS_S if longer > budget_s), 3 * budget_s))
    text = f"{seconds}s" if seconds % 60 else f"{seconds // 60}m"
    return f"Firmer: --budget {text} continues from here."
