"""Estimate of when more devices help a script for one: after its input, from a larger batch on."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from nfold.core.stats import Interval
from nfold.explain.design import ExperimentDesign, Trial, replicas
from nfold.explain.estimate.bootstrap import BootstrapFit, MetricView
from nfold.explain.estimate.samples import Samples, ratio
from nfold.explain.result.budget import STARVED_FRACTION, SeveralDevices
from nfold.explain.trials import TrialResults


def one_device_trials(design: ExperimentDesign) -> tuple[Trial, ...]:
    """Return one device with the whole batch and replayed input, and with its share.

    No trial if the batch of the script cannot be divided or its input cannot be replayed.
    """
    divided = design.single_device_script and design.scaling == "strong"
    if not divided or not design.can_replay_input:
        return ()
    return design.baseline.under(input="replayed"), design.one_device("replayed")


def estimate_several_devices(
    design: ExperimentDesign, results: TrialResults, fit: BootstrapFit
) -> SeveralDevices | None:
    """Return what the input costs one device, and from which batch on more devices help.

    One device takes a + b·x for x samples, N take a + b·x / N + e: they are faster above
    x = e·N / (b·(N - 1)). b comes from two batches with replayed input, e from replicas with and
    without a gradient exchange after backward.
    """
    own, n = one_device_trials(design), design.devices
    if not own or not results.has((design.baseline, *own)):
        return None
    whole, share = own
    samples = (design.plan.batch or 1) - design.batch_per_device
    apart = replicas(design, "real")
    together = replicas(design, "real", exchange_after_backward=True)

    def input_ms(view: MetricView) -> Samples:
        return view.step(design.baseline) - view.step(whole)

    def step_ms(view: MetricView) -> Samples:
        return view.step(design.baseline)

    def sample_ms(view: MetricView) -> Samples:
        return np.maximum(0.0, view.step(whole) - view.step(share)) / samples

    def exchange_ms(view: MetricView) -> Samples:
        return np.maximum(0.0, view.step(together) - view.step(apart))

    def batch(view: MetricView) -> Samples:
        return ratio(exchange_ms(view) * n, sample_ms(view) * (n - 1), otherwise=math.inf)

    lost, step = fit.interval(input_ms), fit.interval(step_ms)
    starved = lost.value > STARVED_FRACTION * step.value
    found = SeveralDevices(
        input_ms=lost,
        step_ms=step,
        is_starved=starved and fit.is_significant(lost, input_ms, step_ms),
    )
    if not results.has((apart, together)):
        return found
    return replace(
        found,
        batch=_finite(fit.interval(batch)),
        exchange_ms=fit.interval(exchange_ms),
        sample_ms=fit.interval(sample_ms),
    )


def _finite(found: Interval) -> Interval | None:
    if not math.isfinite(found.value):
        return None
    high = found.high if found.high is not None and math.isfinite(found.high) else None
    return Interval(found.value, found.low, high)
