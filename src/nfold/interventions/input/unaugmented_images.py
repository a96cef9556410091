"""Train on images without augmentation."""

from __future__ import annotations

from nfold.core.plan import Plan
from nfold.interventions.intervention import Intervention, WorkloadFacts


class AugmentedImages(Intervention[bool]):
    """Images are augmented."""

    default = True
    refused_in_scripts = "the augmentation of a script cannot be separated"
    applied_in = ("engines/torch/trainer.py",)

    def torch_refusal(self, value: bool, plan: Plan, workload: WorkloadFacts) -> str | None:
        if workload.is_script:
            return self.refused_in_scripts
        return None if workload.augments or workload.is_function else "nothing is augmented"
