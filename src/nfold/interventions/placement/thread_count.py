"""Set the number of threads of a rank on the host."""

from __future__ import annotations

from typing import Any

from nfold.core.errors import UsageError
from nfold.core.plan import Plan
from nfold.core.source_edit import SetVariable, SourceEdit
from nfold.interventions.intervention import TorchSetting
from nfold.interventions.script_edits import edit_calls


class ThreadCount(TorchSetting[int | None]):
    """Threads of a rank on the host; None: as many as it has without nfold."""

    default = None
    kind = "remedy"
    numerics = "rounding"
    switchable = True
    # OMP_NUM_THREADS, and calls of the script that set the number
    applied_in = ("instrument/rank_environment.py", "instrument/hooks/runtime_hooks.py")

    def check(self, value: int | None) -> None:
        if value is not None and value < 1:
            raise UsageError(f"{self.name} {value}: allowed are whole numbers from 1")

    def switchable_in_workload(self, plan: Plan) -> bool:
        return "compiled" not in str(plan.step)  # another number would recompile the step

    def read(self, torch: Any) -> Any:
        return torch.get_num_threads()

    def write(self, torch: Any, setting: Any) -> None:
        torch.set_num_threads(setting)

    def values_to_try(self, profile: Any, plan: Plan, cores: int) -> tuple[int, ...]:
        fair = max(1, cores // (plan.devices or 1) - (plan.workers or 0))
        return tuple(dict.fromkeys((fair, max(1, fair // 2), 1)))

    def source_edits(self, value: int | None, profile: Any) -> tuple[SourceEdit, ...] | None:
        if value is None:
            return None
        in_script = edit_calls(profile, "threads", "set_num_threads", {"count": value})
        return in_script or (SetVariable(name="OMP_NUM_THREADS", value=str(value)),)
