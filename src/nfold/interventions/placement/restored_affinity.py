"""Give a rank back the cores that it had when it started."""

from __future__ import annotations

from typing import Any

from nfold.interventions.intervention import Intervention


class RestoredAffinity(Intervention[bool]):
    """The script and its libraries do not bind a rank to fewer cores than it had at its start.

    There is no source edit: the script does not know the cores after a library has bound it.
    """

    default = False
    labels = {True: "CPU affinity of the start"}
    kind = "remedy"
    numerics = "same"
    by_hand = "restore os.sched_setaffinity() after the import or the line that binds the process"
    refused_in_workloads = "workloads bind no rank to fewer cores"
    needed_in_run = "binding of the process to cores"
    applied_in = ("instrument/hooks/start_cores.py",)

    def is_useful(self, profile: Any) -> bool:
        return bool(profile.shared_cores or profile.source_locations.get("affinity"))
