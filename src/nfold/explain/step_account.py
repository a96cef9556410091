"""Divide a step on N devices among its costs, and choose the changes. Pure functions."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from nfold.explain.advice.pytorch import restore_affinity, split_code, split_location
from nfold.explain.cause_costs import Attribution, remaining_ms
from nfold.explain.causes import CAUSES_BY_ID
from nfold.explain.causes.collectives import LATENCY
from nfold.explain.causes.cost_model import component
from nfold.explain.design import Trial, name_trial
from nfold.explain.estimate.bootstrap import MetricView, Statistic
from nfold.explain.estimate.samples import Samples
from nfold.explain.result.budget import (
    MIN_STEP_FRACTION,
    ROW_LABELS,
    SUSPECTED_LOSS_FRACTION,
    WAITING,
    WORKING,
    AccountRow,
    Alternative,
    Change,
    Finding,
    StepAccount,
    TrialSummary,
)

# The rows of causes that have no row of their own name.
SHARED_ROWS = {
    "input": "data-loader",
    "storage": "data-loader",
    "link": "communication",
    "network": "communication",
    "launch-bound": "launch",
}
COMPONENT_ROWS = {LATENCY: "communication"}
"""The rows of components that do not belong to the row of their cause."""
PART_LABELS = {
    "input": WORKING,
    "storage": WAITING,
    "link": "bytes on the link",
    "network": "bytes on the network",
    LATENCY: "latency, one element per bucket",
}
TIE_FRACTION = 0.02
"""Of the fastest step: a smaller setting within this is preferred."""
SETTING = re.compile(r"(?:--([a-z-]+)[ =]|\b([a-z_]+)=)(\w+)")


@dataclass(frozen=True)
class Part:
    """A part of a row: a cause, or a component of a cause that has another row."""

    name: str
    cause: str
    ms: Statistic


def _sum_of(parts: Iterable[Part]) -> Statistic:
    costs = [part.ms for part in parts]
    return lambda view: sum(cost(view) for cost in costs)


def _row_of(cause_id: str) -> str:
    return SHARED_ROWS.get(cause_id, cause_id)


class StepAccountBuilder:
    """Builds the account of one attribution.

    The step of one device with its share of the batch is the base: compute is what is left of it
    without its own costs. Every cause adds what N devices lose beyond that.
    """

    def __init__(self, attribution: Attribution, findings: Sequence[Finding]) -> None:
        """``findings``: of N devices and of one; both kinds may name the same cause."""
        self.attribution, self.findings, self.fit = attribution, findings, attribution.fit
        self.design, self.results = attribution.design, attribution.results
        view = self.view = attribution.view
        self._has_share = view.has(self.design.one_device("real"))
        self._costs, self._rows = attribution.costs, dict[str, list[Part]]()
        self._single, self._more = dict[str, Statistic](), list[str]()
        for cause in dict.fromkeys(finding.cause for finding in findings):
            if _row_of(cause) in ROW_LABELS:
                self._add_cause(cause)

    def _add_cause(self, cause: str) -> None:
        costs, same_loss = self._costs[cause], CAUSES_BY_ID[cause].same_loss
        # If both estimates are of the same time, the larger counts, and only on one device.
        whole = costs.total_ms if same_loss else costs.one_device_ms
        trials = costs.one_device_trials
        known = self._has_share and bool(trials) and self.view.has(*trials)
        if known and (costs.one_device_ms(self.view) > 0 or whole(self.view) > 0):
            self._single[cause] = whole
        if costs.evidence(self.view) and not (self._has_share and same_loss):
            self._more.append(cause)
        rest: Statistic = functools.partial(self._cause_ms, cause)
        for name, row in COMPONENT_ROWS.items():
            if name in self._components(cause):
                part = component(costs, name)
                self._rows.setdefault(row, []).append(Part(name, cause, part))
                rest = functools.partial(_difference, rest, part)
        self._rows.setdefault(_row_of(cause), []).append(Part(cause, cause, rest))

    def build(self) -> StepAccount:
        """The account, its small rows merged into what is not attributed."""
        rows = {row: self._row(row, parts) for row, parts in self._rows.items()}
        certain = {row for row in rows if self._is_significant(rows[row])}
        least = MIN_STEP_FRACTION * self.fit.value(self.step_ms)
        # Those that are likely are shown too: a hint is better than "not attributed".
        likely = {row for row in rows if (rows[row].ms.low or 0.0) > least}
        if not certain:
            likely |= {row for row in rows if self._has_repair(rows[row])}
        shown = {
            row: _sum_of(parts) for row, parts in self._rows.items() if row in certain | likely
        }
        known = [part for row in shown for part in self._rows[row]]
        return StepAccount(
            step_ms=self.fit.interval(self.step_ms),
            rows=self._with_rest(
                (replace(rows[row], significant=row in certain) for row in shown),
                self.step_ms,
                _sum_of(known),
            ),
            small=tuple(rows[row] for row in rows if row not in shown),
            one_device=self._one_device_rows(shown),
        )

    def _with_rest(
        self, rows: Iterable[AccountRow], step_ms: Statistic, known_ms: Statistic
    ) -> tuple[AccountRow, ...]:
        def rest(view: MetricView) -> Samples:
            return step_ms(view) - self._compute_ms(view) - known_ms(view)

        return (
            AccountRow(id="compute", ms=self.fit.interval(self._compute_ms)),
            *sorted(rows, key=lambda row: (not row.significant, -row.ms.value)),
            AccountRow(id="not-attributed", ms=self.fit.interval(rest)),
        )

    def step_ms(self, view: MetricView) -> Samples:
        """A measured step on N devices, with its share of the time between epochs."""
        divisor = self.design.devices if self.attribution.work_is_undivided else 1
        return self.attribution.achieved_ms(view) / divisor

    def _compute_ms(self, view: MetricView) -> Samples:
        if not self._has_share:
            return self.attribution.ideal_ms(view)
        return self.attribution.compute_ms(self._single, view)

    def _components(self, cause: str) -> dict[str, Samples]:
        return self._costs[cause].components(self.view) if cause in self._more else {}

    def _cause_ms(self, cause: str, view: MetricView) -> Samples:
        more = self._costs[cause].lost_ms(view) if cause in self._more else 0.0
        return more + self._one_device_ms([cause], view)

    def _one_device_ms(self, causes: Iterable[str], view: MetricView) -> Samples:
        return sum(self._single[c](view) if c in self._single else 0.0 for c in causes)

    def _is_significant(self, row: AccountRow) -> bool:
        named = any(one.significant and _row_of(one.cause) == row.id for one in self.findings)
        large = row.ms.value > MIN_STEP_FRACTION * self.fit.value(self.step_ms)
        total = _sum_of(self._rows[row.id])
        return large and (named or self.fit.is_significant(row.ms, total, self.step_ms))

    def _has_repair(self, row: AccountRow) -> bool:
        """Return whether the probe run observed what costs this much, and how to repair it."""
        step_ms = self.fit.value(self.step_ms)
        large = row.ms.value > SUSPECTED_LOSS_FRACTION * step_ms
        return large and any(CAUSES_BY_ID[one].has_repair(self.design) for one in row.causes)

    def _row(self, row: str, parts: Sequence[Part]) -> AccountRow:
        causes = [part.cause for part in parts if part.name == part.cause]
        split = {PART_LABELS.get(p.name, p.name): self.fit.interval(p.ms) for p in parts}
        if len(parts) == 1:
            split = {
                name: self.fit.interval(component(self._costs[cause], name))
                for cause in causes
                for name in self._components(cause)
                if name not in COMPONENT_ROWS
            }
        ids, total, view = [*causes], _sum_of(parts), self.view
        for part in parts:
            if part.cause not in causes:
                ids.insert(0 if 2 * part.ms(view) > total(view) else len(ids), part.cause)
        return AccountRow(
            id=row,
            ms=self.fit.interval(total),
            causes=tuple(ids),
            one_device_ms=self.fit.interval(functools.partial(self._one_device_ms, causes)),
            parts=tuple(sorted(split.items(), key=lambda part: -part[1].value)),
        )

    def _one_device_rows(self, shown: Mapping[str, object]) -> tuple[AccountRow, ...]:
        if self.design.devices == 1 or not self._has_share:
            return ()
        groups: dict[str, list[Part]] = {}
        for cause, cost in self._single.items():
            if _row_of(cause) in shown:
                groups.setdefault(_row_of(cause), []).append(Part(cause, cause, cost))
        totals = {row: _sum_of(parts) for row, parts in groups.items()}
        rows = (
            AccountRow(
                id=row, ms=self.fit.interval(totals[row]), causes=tuple(part.name for part in parts)
            )
            for row, parts in groups.items()
        )
        return self._with_rest(
            rows,
            self.attribution.one_device_step_ms,
            lambda view: sum(total(view) for total in totals.values()),
        )

    def changes(self, account: StepAccount) -> tuple[Change, ...]:
        """One change per source line, that of the largest cost first."""
        found: dict[tuple[str, str], Change] = {}
        for row in account.costs:
            fixes: dict[str, Trial] = {}
            for name in row.causes:
                fixes |= self.attribution.measured_fixes(name)
            change = self._measured_change(row, fixes) or self._expected_change(row, fixes)
            if change is not None:
                found.setdefault((change.location, change.setting or change.code), change)
        if self.design.facts.shared_cores:
            location, advice = split_location(restore_affinity(self.design.facts))
            unknown = Change(row="threads", location=location, code=advice)
            found = {(location, advice): found.get((location, advice), unknown), **found}
        return tuple(found.values())

    def _measured_change(self, row: AccountRow, fixes: dict[str, Trial]) -> Change | None:
        """The fastest measured fix that is faster than today beyond the noise; of those as fast, the
        smallest setting.
        """
        after = {
            text: self._after_ms(trial, self.view)
            for text, trial in fixes.items()
            if self.attribution.is_faster(trial)
        }
        if not after:
            return None
        near = (1 + TIE_FRACTION) * min(after.values())
        best = min(
            (text for text in after if after[text] <= near),
            key=lambda text: (_number(_setting(text)[1]), after[text]),
        )
        gained = functools.partial(self.attribution.saved_ms, fixes[best])
        return self._change(row, best, gained, fixes, measured=True)

    def _expected_change(self, row: AccountRow, fixes: dict[str, Trial]) -> Change | None:
        """The advice of the cause, with the throughput if its whole cost goes."""
        findings = [finding for finding in self.findings if finding.cause in row.causes]
        first = row.causes[0]
        findings.sort(
            key=lambda finding: (
                not finding.significant,
                row.id == "communication" and finding.cause != first,
                -finding.total_ms.value,
            )
        )
        for finding in findings:
            if finding.fix and finding.fix not in fixes:
                gained = _sum_of(self._rows[row.id])
                if CAUSES_BY_ID[finding.cause].advice_in_words:
                    gained = self._costs[finding.cause].gained_ms
                repair = CAUSES_BY_ID[finding.cause].has_repair(self.design)
                return self._change(row, finding.fix, gained, fixes, is_repair=repair)
        return None

    def _change(
        self,
        row: AccountRow,
        text: str,
        gained: Statistic,
        fixes: dict[str, Trial],
        *,
        measured: bool = False,
        is_repair: bool = False,
    ) -> Change:
        location, advice = split_location(text)
        in_words = CAUSES_BY_ID[row.causes[0]].advice_in_words
        code, note = ("", advice) if in_words else split_code(advice)
        setting, _ = _setting(code)
        varied, alternatives = self._alternatives(fixes)

        def factor(view: MetricView) -> Samples:
            now = self.attribution.achieved_ms(view)
            return now / remaining_ms(now, gained(view))

        return Change(
            row=row.id,
            location=location,
            code=code or note,
            note=note if code else "",
            setting=setting,
            current=self._current_value(setting) if setting else "",
            measured=measured,
            is_repair=is_repair,
            samples_per_s=self.attribution.samples_per_s(gained),
            factor=self.fit.interval(factor),
            varied=varied,
            alternatives=alternatives,
        )

    def _after_ms(self, trial: Trial, view: MetricView) -> Samples:
        return self.step_ms(view) - self.attribution.saved_ms(trial, view)

    def _current_value(self, setting: str) -> str:
        profile, plan = self.design.profile, self.design.plan
        if setting in ("num_workers", "workers"):
            return str(plan.workers or 0)
        for owner in (profile.loader, profile) if profile is not None else (plan,):
            value = getattr(owner, setting.replace("-", "_"), None)
            if value is not None and not callable(value):
                return str(value)
        return ""

    def _alternatives(self, fixes: dict[str, Trial]) -> tuple[str, tuple[Alternative, ...]]:
        """The numeric setting that most fixes change, and its measured values."""
        values: dict[str, dict[int, Trial]] = {}
        for text, trial in fixes.items():
            name, value = _setting(text)
            if value.isdigit():
                values.setdefault(name, {})[int(value)] = trial
        setting = max(values, key=lambda name: len(values[name]), default="")
        now = self._current_value(setting)
        if not now.isdigit():
            return "", ()
        found = {int(now): self.design.actual(), **values[setting]}
        batch = 1e3 * (self.design.plan.batch or 1)

        def alternative(value: int) -> Alternative:
            after = functools.partial(self._after_ms, found[value])
            return Alternative(
                value=str(value),
                step_ms=self.fit.interval(after),
                samples_per_s=self.fit.interval(lambda view: batch / after(view)),
            )

        return setting, tuple(alternative(value) for value in sorted(found))

    def trials(self) -> tuple[TrialSummary, ...]:
        """Every variant with the steps of its runs."""
        return tuple(
            TrialSummary(
                label=name_trial(trial, self.design.plan),
                devices=trial.plan.devices or 1,
                step_ms=tuple(
                    found["step"]
                    for measurement in runs.values()
                    if "step" in (found := trial.metrics(measurement))
                ),
                ids=tuple(measurement.id for measurement in runs.values()),
            )
            for trial, runs in self.results.runs.items()
        )


def _difference(whole: Statistic, part: Statistic, view: MetricView) -> Samples:
    return whole(view) - part(view)


def _setting(text: str) -> tuple[str, str]:
    """Return the name and the value of the first setting in an advice; empty without one."""
    match = SETTING.search(split_location(text)[1])
    return (match[1] or match[2], match[3]) if match else ("", "")


def _number(value: str) -> int:
    return int(value) if value.isdigit() else 0
