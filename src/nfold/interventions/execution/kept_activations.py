"""Keep the activations of a forward in place of computing them again in the backward."""

from __future__ import annotations

from typing import Any

from nfold.interventions.intervention import Intervention


class ActivationCheckpointing(Intervention[bool]):
    """``torch.utils.checkpoint`` frees activations, and its backward computes the forward again.

    Without it a step needs more memory: later batches may be larger than those that were tried.
    """

    default = True
    labels = {False: "no activation checkpointing"}
    kind = "remedy"
    numerics = "same"
    permission = "memory"
    by_hand = "remove the calls of checkpoint(), or call model.gradient_checkpointing_disable()"
    refused_in_workloads = "workloads keep their activations already"
    needed_in_run = "activation checkpointing"
    applied_in = ("instrument/hooks/checkpoint_hooks.py",)

    def is_useful(self, profile: Any) -> bool:
        return "checkpoint" in profile.source_locations
