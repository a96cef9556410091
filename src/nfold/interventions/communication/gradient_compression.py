"""Send the fp32 gradients of DistributedDataParallel in 16 bits."""

from __future__ import annotations

from typing import Any, Literal

from nfold.core.plan import Plan
from nfold.core.source_edit import SourceEdit
from nfold.interventions.communication.ddp_remedy import DdpRemedy
from nfold.interventions.intervention import WorkloadFacts
from nfold.interventions.script_edits import add_after_wrapper

HOOKS = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks"


class GradientCompression(DdpRemedy[Literal["none", "bf16", "fp16"]]):
    """Gradients are converted, divided by the number of ranks, added up in 16 bits, and converted back.

    These are PyTorch's own hooks. The one of bf16 needs NCCL; gloo adds up fp16.
    """

    default = "none"
    labels = {"bf16": "gradients sent in bf16", "fp16": "gradients sent in fp16"}
    numerics = "training"
    permission = "communication"
    switchable = True
    changes_communication = True
    by_hand = "give DistributedDataParallel the hook with register_comm_hook"
    applied_in = ("engines/torch/communication/gradient_exchange.py",)

    def torch_refusal(self, value: str, plan: Plan, workload: WorkloadFacts) -> str | None:
        return None if workload.is_script else "the plan sets the type of exchanged gradients"

    def is_useful(self, profile: Any) -> bool:
        return bool(profile.compressed_gradient_type)

    def values_to_try(self, profile: Any, plan: Plan, cores: int) -> tuple[Any, ...]:
        return (profile.compressed_gradient_type,)

    def source_edits(self, value: str, profile: Any) -> tuple[SourceEdit, ...] | None:
        hook = f"{value}_compress_hook"
        return add_after_wrapper(
            profile, f"{{assigned}}.register_comm_hook(None, {hook})", f"from {HOOKS} import {hook}"
        )
