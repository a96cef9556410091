"""Make some more steps under a profiler."""

from __future__ import annotations

from nfold.interventions.intervention import Intervention


class ProfilerSteps(Intervention[bool]):
    """A script makes some more steps under a profiler, in no window."""

    default = False
    stored_name = "traced"
    labels = {True: "profiled"}
    is_observation = True
    refused_in_workloads = "only scripts are profiled"
    applied_in = ("instrument/run_length.py",)
