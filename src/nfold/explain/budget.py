"""From the runs of a ladder to the N-fold budget. Pure functions."""

from __future__ import annotations

from nfold.budget import Budget
from nfold.explain import batch, head
from nfold.explain.account import Attribution
from nfold.explain.doubts import (
    collect_caveats,
    faster_library_caveats,
    find_training_errors,
    short_step_caveats,
)
from nfold.explain.fit import RESAMPLES
from nfold.explain.ladder import ExperimentDesign
from nfold.explain.measured import TrialResults
from nfold.explain.rows import FindingBuilder
from nfold.explain.untested import epoch_boundary_lower_bound, unmeasured_causes


def build_budget(
    target: str, design: ExperimentDesign, results: TrialResults, *, resamples: int = RESAMPLES
) -> Budget:
    """Where the rest of N-fold went, as far as was measured; ``one`` and ``full`` were.

    Of one device, where the rest of what its compute alone would do went.
    """
    account = Attribution(design, results, resamples)
    made = FindingBuilder(account)
    rows, single = made.multi_device_findings(), made.one_device_findings()
    speedup = account.fit.interval(account.speedup)
    return Budget(
        target=target,
        plan=design.plan,
        scaling=design.scaling,
        one_device=account.speed(design.baseline),
        n_devices=account.speed(
            design.actual(), design.devices if account.work_is_undivided else 1
        ),
        ideal_ms=account.fit.interval(account.ideal_ms),
        speedup=speedup,
        rows=tuple(rows),
        one_device_rows=tuple(single),
        interactions=tuple(made.interactions([*rows, *single])),
        device_bound=made.device_bound(),
        not_significant_ms=account.not_significant_ms(rows if design.devices > 1 else single),
        not_attributed_ms=account.not_attributed_ms(rows),
        training_errors=find_training_errors(
            account.caveat_texts, account.duplicated_epochs, design.profile
        ),
        caveats=(
            *faster_library_caveats(design, results, account.achieved_ms(account.fit.view)),
            *short_step_caveats(design, account.fit.view.step(design.baseline)),
            *collect_caveats(design, results, account.fit),
        ),
        unmeasured=tuple(unmeasured_causes(design, results, account.fit.view)),
        lower_bound=epoch_boundary_lower_bound(design, results, account.fit.view),
        break_even_batch=None
        if design.single_device_script or design.devices == 1
        else batch.find_break_even_batch(design, results, account.fit, speedup),
        parallelism=head.describe_parallelism(design.profile) if design.profile else "",
        headline=_headline(target, design),
    )


def _headline(target: str, design: ExperimentDesign) -> str:
    """Of a script."""
    seen = design.profile
    return (
        ""
        if seen is None
        else head.write_headline(target, seen, design.devices, design.multi_process_failure)
    )
