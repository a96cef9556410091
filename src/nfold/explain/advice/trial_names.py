"""The name of a trial, by what it changes."""

from __future__ import annotations

import dataclasses

from nfold.core.format import pluralize
from nfold.core.plan import Plan
from nfold.core.variant import Variant
from nfold.explain.design import Trial

VARIANT_NAMES: dict[tuple[str, object], str] = {
    ("input", "replayed"): "replayed input",
    ("input", "resident"): "input on the device",
    ("exchange", "none"): "no all-reduce",
    ("exchange", "barrier"): "barrier only",
    ("exchange", "half"): "half the gradient bytes",
    ("independent", True): "replicas",
    ("synchronised_batch_norm", False): "no SyncBatchNorm",
    ("captured", True): "CUDA graph",
    ("broadcast_buffers", False): "broadcast_buffers=False",
    ("host_syncs", False): "no host reads",
    ("anomaly_detection", False): "no anomaly detection",
    ("exchange_each_micro_batch", False): "one all-reduce per step",
    ("find_unused_parameters", False): "find_unused_parameters=False",
    ("expandable_segments", True): "expandable segments",
    ("channels_last", True): "channels_last",
    ("compiled", "default"): "torch.compile",
    ("compiled", "reduce-overhead"): "torch.compile, CUDA graphs",
    ("exchange_after_backward", True): "all-reduce after backward",
    ("profiler_steps", True): "profiled",
}
HIDDEN_FIELDS = ("devices", "strategy", "steps", "epochs", "warmup_steps")
"""Fields of a plan that are named elsewhere or differ between all trials."""


def name_trial(trial: Trial, actual: Plan | None = None) -> str:
    """``2 devices, replayed input, no all-reduce``.

    ``actual`` is the plan of the real run: fields that differ from it are named too.
    """
    words = [pluralize(trial.plan.devices or 1, "device"), *_variant_words(trial.variant)]
    if trial.plan.epochs:
        words.append("whole epochs")
    if actual is not None:
        own, usual = trial.plan.to_dict(), actual.to_dict()
        one_device = trial.plan.devices != actual.devices
        changed = {name for name in own if own[name] != usual.get(name)} - {*HIDDEN_FIELDS}
        words += [
            f"{name} {own[name]}"
            for name in sorted(changed)
            if not (one_device and name == "batch")
        ]
    return ", ".join(words)


def _variant_words(variant: Variant) -> list[str]:
    words = []
    for field in dataclasses.fields(variant):
        value = getattr(variant, field.name)
        if value == field.default:
            continue
        name = VARIANT_NAMES.get((field.name, value))
        if field.name == "batches_per_epoch":
            name = "short epochs"
        elif field.name == "devices":
            name = "ranks on other devices"
        words.append(name or f"{field.name.replace('_', ' ')} {value}")
    return words
