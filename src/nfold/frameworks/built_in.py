"""The samples of a built-in workload, as every framework gets them."""

from __future__ import annotations

from collections.abc import Mapping

from nfold import data
from nfold.data.arrays import Arrays, evaluated_on, limited
from nfold.data.centres import arrays_of
from nfold.data.photographs import Photographs
from nfold.frameworks.photographs import photographs_of
from nfold.plan import Plan
from nfold.workloads.base import Info


def samples_of(
    known: Info, chosen: Mapping[str, int], plan: Plan
) -> tuple[Arrays, Photographs | None]:
    """Arrays, cut as the parameters say, and the photographs where samples are files.

    Of those the arrays have the labels and what is evaluated on.
    """
    if known.defaults.encoded:
        found = photographs_of(plan, chosen)
        return arrays_of(found, chosen), found
    arrays = limited(data.load(str(known.dataset)), chosen.get("samples", 0))
    return evaluated_on(arrays, chosen.get("test_samples", 0)), None
