"""End an epoch of a script early, so that epoch boundaries can be measured."""

from __future__ import annotations

from nfold.interventions.intervention import Intervention


class ShortEpochs(Intervention[int | None]):
    """An epoch of a script ends after so many batches of a rank."""

    default = None
    stored_name = "pass_batches"
    refused_in_workloads = "epochs of a workload are measured whole"
    applied_in = ("instrument/input/dataloader_hook.py", "instrument/epoch_boundaries.py")

    def label(self, value: int | None) -> str:
        return "short epochs"
