"""Divide a step on N devices among its costs, and choose the changes. Pure functions."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from nfold.core.measurement import Measurement
from nfold.explain.advice.pytorch import split_code, split_location
from nfold.explain.advice.trial_names import name_trial
from nfold.explain.cause_costs import Attribution
from nfold.explain.causes import CAUSES_BY_ID, Cause
from nfold.explain.causes.cause import remaining_ms
from nfold.explain.causes.synchronization import LATENCY
from nfold.explain.design import ExperimentDesign, Trial
from nfold.explain.estimate.bootstrap import MetricView, Statistic
from nfold.explain.metrics import compute_metrics
from nfold.explain.result.account import (
    WAITING,
    WORKING,
    AccountRow,
    Alternative,
    Change,
    StepAccount,
    TrialSummary,
)
from nfold.explain.result.budget import MIN_STEP_FRACTION, Finding
from nfold.explain.trials import TrialResults

ROW_OF_CAUSE = {
    "input": "data-loader",
    "storage": "data-loader",
    "link": "communication",
    "network": "communication",
    "synchronization": "synchronization",
    "copies": "copies",
    "launch-bound": "launch",
    "epoch-boundary": "epoch-boundary",
    "imbalance": "imbalance",
    "threads": "threads",
    "layout": "layout",
    "memory": "memory",
    "single-process": "single-process",
}
PART_LABELS = {
    "input": WORKING,
    "storage": WAITING,
    "link": "bytes on the link",
    "network": "bytes on the network",
    "latency": "latency, one element per bucket",
}
TIE_FRACTION = 0.02
"""Of the fastest step: a smaller setting within this is preferred."""
SETTING = re.compile(r"(?:--([a-z-]+)[ =]|\b([a-z_]+)=)(\w+)")


class StepAccountBuilder:
    """Builds the account of one attribution.

    The step of one device with its share of the batch is the base: compute is what is left of it
    without its own costs. Every cause adds what N devices lose beyond that.
    """

    def __init__(self, attribution: Attribution, findings: Sequence[Finding]) -> None:
        """``findings``: of N devices and of one; both kinds may name the same cause."""
        self.attribution, self.findings = attribution, findings
        self.design: ExperimentDesign = attribution.design
        self.results: TrialResults = attribution.results
        self.fit = attribution.fit
        view = self.fit.view
        self._has_share = view.has(self.design.one_device("real"))
        self._causes = [
            CAUSES_BY_ID[name]
            for name in dict.fromkeys(row.cause for row in findings)
            if name in ROW_OF_CAUSE
        ]
        self._losing = [
            cause
            for cause in self._causes
            if self._has_share and self._one_device_known(cause)
            if cause.one_device_ms(self.design, view) > 0
            or (cause.id == "launch-bound" and cause.total_ms(self.design, view) > 0)
        ]
        self._more = [
            cause
            for cause in self._causes
            if self.design.devices > 1 and cause.available_trials(self.design, view)
            if not (self._has_share and cause.id == "launch-bound")
        ]

    def build(self) -> StepAccount:
        """The account, its small rows merged into what is not attributed."""
        costs = self._costs()
        self._row_costs = {row: _total(parts) for row, parts in costs.items()}
        shown: dict[str, dict[str, Statistic]] = {}
        small = []
        rows = {row: self._row(row, parts) for row, parts in costs.items()}
        certain = {row for row, parts in costs.items() if self._is_significant(row, parts)}
        least = MIN_STEP_FRACTION * self.step_ms(self.fit.view)
        for row, parts in costs.items():
            # Without any certain cost, show those that are likely: a hint is better than none.
            likely = not certain and (rows[row].ms.low or 0.0) > least
            if row in certain or likely:
                shown[row] = parts
            else:
                small.append(rows[row])

        def rest(view: MetricView) -> float:
            known = sum(cost(view) for parts in shown.values() for cost in parts.values())
            return self.step_ms(view) - self._compute_ms(view) - known

        ordered = sorted((rows[row] for row in shown), key=lambda row: -row.ms.value)
        return StepAccount(
            step_ms=self.fit.interval(self.step_ms),
            rows=(
                AccountRow(id="compute", ms=self.fit.interval(self._compute_ms)),
                *(replace(row, significant=row.id in certain) for row in ordered),
                AccountRow(id="not-attributed", ms=self.fit.interval(rest)),
            ),
            small=tuple(small),
            one_device=self._one_device_rows(shown),
        )

    def step_ms(self, view: MetricView) -> float:
        """A measured step on N devices, with its share of the time between epochs."""
        divisor = self.design.devices if self.attribution.work_is_undivided else 1
        return self.attribution.achieved_ms(view) / divisor

    def _compute_ms(self, view: MetricView) -> float:
        if not self._has_share:
            return self.attribution.ideal_ms(view)
        costs = [(self._one_device_cause_ms(cause, view), cause) for cause in self._losing]
        busy = max((cause.floor_ms(self.design) for cause in self._losing), default=0.0)
        least = busy - sum(ms for ms, cause in costs if cause.occupies_device)
        own = self.attribution.one_device_step_ms(view)
        return remaining_ms(own, sum(ms for ms, _ in costs), least)

    def _one_device_known(self, cause: Cause) -> bool:
        trials = cause.one_device_trials(self.design)
        return bool(trials) and self.fit.view.has(*trials)

    def _costs(self) -> dict[str, dict[str, Statistic]]:
        """The parts of every row; a part of a row is a cause, or a component of one."""
        found: dict[str, dict[str, Statistic]] = {}
        for cause in self._causes:
            own = functools.partial(self._cause_ms, cause)
            parts: dict[str, tuple[str, Statistic]] = {cause.id: (ROW_OF_CAUSE[cause.id], own)}
            if cause.id == "synchronization" and LATENCY in self._components(cause):
                latency = functools.partial(self._component_ms, cause, LATENCY)
                rest = functools.partial(_difference, own, latency)
                parts = {
                    "latency": ("communication", latency),
                    cause.id: ("synchronization", rest),
                }
            for name, (row, cost) in parts.items():
                found.setdefault(row, {})[name] = cost
        return found

    def _components(self, cause: Cause) -> dict[str, float]:
        return cause.components(self.design, self.fit.view) if cause in self._more else {}

    def _component_ms(self, cause: Cause, name: str, view: MetricView) -> float:
        return cause.components(self.design, view)[name]

    def _cause_ms(self, cause: Cause, view: MetricView) -> float:
        more = cause.lost_ms(self.design, view) if cause in self._more else 0.0
        return more + self._one_device_cause_ms(cause, view)

    def _one_device_cause_ms(self, cause: Cause, view: MetricView) -> float:
        if cause not in self._losing:
            return 0.0
        if cause.id == "launch-bound":  # with strong scaling, both estimates are of the same time
            return cause.total_ms(self.design, view)
        return cause.one_device_ms(self.design, view)

    def _is_significant(self, row: str, parts: dict[str, Statistic]) -> bool:
        total = _total(parts)
        cost = self.fit.interval(total)
        named = any(
            finding.significant and ROW_OF_CAUSE.get(finding.cause) == row
            for finding in self.findings
        )
        large = cost.value > MIN_STEP_FRACTION * self.step_ms(self.fit.view)
        return large and (named or self.fit.is_significant(cost, total, self.step_ms))

    def _row(self, row: str, parts: dict[str, Statistic]) -> AccountRow:
        causes = [CAUSES_BY_ID[name] for name in parts if name in CAUSES_BY_ID]
        split = {
            PART_LABELS.get(name, name): self.fit.interval(cost) for name, cost in parts.items()
        }
        if len(parts) == 1:
            split = {
                name: self.fit.interval(functools.partial(self._component_ms, causes[0], name))
                for cause in causes
                for name in self._components(cause)
                if name != LATENCY
            }
        ids = [cause.id for cause in causes]
        if "latency" in parts:
            view, later = self.fit.view, len(ids)
            if 2 * parts["latency"](view) > sum(cost(view) for cost in parts.values()):
                later = 0
            ids.insert(later, "synchronization")
        return AccountRow(
            id=row,
            ms=self.fit.interval(_total(parts)),
            causes=tuple(ids),
            one_device_ms=self.fit.interval(
                lambda view: sum(self._one_device_cause_ms(cause, view) for cause in causes)
            ),
            parts=tuple(sorted(split.items(), key=lambda part: -part[1].value)),
        )

    def _one_device_rows(self, shown: Mapping[str, object]) -> tuple[AccountRow, ...]:
        if self.design.devices == 1 or not self._has_share:
            return ()
        groups: dict[str, list[Cause]] = {}
        for cause in self._losing:
            if ROW_OF_CAUSE[cause.id] in shown:
                groups.setdefault(ROW_OF_CAUSE[cause.id], []).append(cause)

        def cost(causes: list[Cause], view: MetricView) -> float:
            return sum(self._one_device_cause_ms(cause, view) for cause in causes)

        def rest(view: MetricView) -> float:
            known = sum(cost(causes, view) for causes in groups.values())
            own = self.attribution.one_device_step_ms(view)
            return own - self._compute_ms(view) - known

        rows = [
            AccountRow(
                id=row,
                ms=self.fit.interval(functools.partial(cost, causes)),
                causes=tuple(cause.id for cause in causes),
            )
            for row, causes in groups.items()
        ]
        return (
            AccountRow(id="compute", ms=self.fit.interval(self._compute_ms)),
            *sorted(rows, key=lambda row: -row.ms.value),
            AccountRow(id="not-attributed", ms=self.fit.interval(rest)),
        )

    def changes(self, account: StepAccount) -> tuple[Change, ...]:
        """One change per source line, that of the largest cost first."""
        found: dict[tuple[str, str], Change] = {}
        for row in account.costs:
            change = self._measured_change(row) or self._expected_change(row)
            if change is not None:
                found.setdefault((change.location, change.setting or change.code), change)
        return tuple(found.values())

    def _fixes(self, row: AccountRow) -> dict[str, Trial]:
        fixes: dict[str, Trial] = {}
        for name in row.causes:
            for text, trial in CAUSES_BY_ID[name].fixes(self.design).items():
                if text and self.results.has([trial]):
                    fixes[text] = trial
        return fixes

    def _measured_change(self, row: AccountRow) -> Change | None:
        """The fastest measured fix that is faster than today beyond the noise; of those as fast, the
        smallest setting.
        """
        fixes, view = self._fixes(row), self.fit.view
        after = {
            text: self._after_ms(trial, view)
            for text, trial in fixes.items()
            if self._is_faster(trial)
        }
        if not after:
            return None
        near = (1 + TIE_FRACTION) * min(after.values())
        best = min(
            (text for text in after if after[text] <= near),
            key=lambda text: (_setting_value(text), after[text]),
        )
        gained = functools.partial(self._gained_ms, fixes[best])
        return self._change(row, best, gained, measured=True, alternatives=fixes)

    def _is_faster(self, trial: Trial) -> bool:
        gained = functools.partial(self._gained_ms, trial)
        return self.fit.is_significant(
            self.fit.interval(gained), gained, self.attribution.achieved_ms
        )

    def _expected_change(self, row: AccountRow) -> Change | None:
        """What the cause's advice is, with the throughput if its whole cost goes."""
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
            if finding.fix and finding.fix not in self._fixes(row):
                gained = self._row_costs[row.id]
                if row.id == "single-process":
                    cause = CAUSES_BY_ID[finding.cause]
                    gained = functools.partial(cause.gained_ms, self.design)
                return self._change(row, finding.fix, gained, alternatives=self._fixes(row))
        return None

    def _change(
        self,
        row: AccountRow,
        text: str,
        gained: Statistic | None,
        *,
        measured: bool = False,
        alternatives: dict[str, Trial] | None = None,
    ) -> Change:
        location, advice = split_location(text)
        code, note = split_code(advice) if row.id != "single-process" else ("", advice)
        match = SETTING.search(code) if code else None
        setting = (match[1] or match[2]) if match else ""
        varied, measured_values = self._alternatives(alternatives or {})
        return Change(
            row=row.id,
            location=location,
            code=code or note,
            note=note if code else "",
            setting=setting,
            current=self._current_value(setting) if setting else "",
            measured=measured,
            samples_per_s=self.attribution.samples_per_s(gained) if gained else None,
            factor=self.fit.interval(functools.partial(self._factor, gained)) if gained else None,
            varied=varied,
            alternatives=measured_values,
        )

    def _factor(self, gained: Statistic, view: MetricView) -> float:
        now = self.attribution.achieved_ms(view)
        return now / remaining_ms(now, gained(view))

    def _gained_ms(self, trial: Trial, view: MetricView) -> float:
        return self.attribution.saved_ms(trial, view)

    def _after_ms(self, trial: Trial, view: MetricView) -> float:
        return self.step_ms(view) - self._gained_ms(trial, view)

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
            match = SETTING.search(split_location(text)[1])
            if match and match[3].isdigit():
                values.setdefault(match[1] or match[2], {})[int(match[3])] = trial
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
                    if "step" in (found := _metrics(measurement, trial))
                ),
                ids=tuple(measurement.id for measurement in runs.values()),
            )
            for trial, runs in self.results.runs.items()
        )


def _difference(whole: Statistic, part: Statistic, view: MetricView) -> float:
    return whole(view) - part(view)


def _total(parts: dict[str, Statistic]) -> Statistic:
    return lambda view: sum(cost(view) for cost in parts.values())


def _metrics(measurement: Measurement, trial: Trial) -> dict[str, float]:
    return compute_metrics(measurement, ranks_synchronize=trial.ranks_synchronize)


def _setting_value(text: str) -> int:
    match = SETTING.search(split_location(text)[1])
    return int(match[3]) if match and match[3].isdigit() else 0
