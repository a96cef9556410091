"""Let cuDNN search for its fastest algorithms."""

from __future__ import annotations

from typing import Any

from nfold.core.plan import Plan
from nfold.core.source_edit import SourceEdit
from nfold.interventions.intervention import TorchSetting, WorkloadFacts
from nfold.interventions.script_edits import add_before_model


class CudnnBenchmark(TorchSetting[bool]):
    """CuDNN measures its algorithms for each shape of a convolution and uses the fastest.

    PyTorch keeps the algorithm of a shape for the whole process: it cannot switch between two steps.
    """

    default = False
    labels = {True: "cudnn.benchmark"}
    kind = "remedy"
    numerics = "rounding"

    def refusal(self, value: bool, plan: Plan) -> str | None:
        if plan.device == "cpu":
            return "cuDNN computes on GPUs only"
        return None

    def torch_refusal(self, value: bool, plan: Plan, workload: WorkloadFacts) -> str | None:
        return None if workload.is_script else "cuDNN searches in workloads already"

    def is_useful(self, profile: Any) -> bool:
        # nn.DataParallel starts new threads in every step, and cuDNN would search in each.
        return bool(profile.convolutions > 0 and profile.parallel != "dp")

    def read(self, torch: Any) -> Any:
        return torch.backends.cudnn.benchmark

    def write(self, torch: Any, setting: Any) -> None:
        torch.backends.cudnn.benchmark = setting

    def source_edits(self, value: bool, profile: Any) -> tuple[SourceEdit, ...] | None:
        return add_before_model(profile, "torch.backends.cudnn.benchmark = True")
