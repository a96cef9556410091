"""The samples of a built-in workload, as every framework gets them."""

from __future__ import annotations

from collections.abc import Mapping

from nfold import data
from nfold.data.arrays import DataSetArrays, limit_test, limit_training
from nfold.data.centres import photograph_arrays
from nfold.data.photographs import PhotographSet
from nfold.frameworks.photographs import load_photographs
from nfold.plan import Plan
from nfold.workloads.base import WorkloadInfo


def load_builtin_samples(
    info: WorkloadInfo, parameters: Mapping[str, int], plan: Plan
) -> tuple[DataSetArrays, PhotographSet | None]:
    """Arrays, cut as the parameters say, and the photographs where samples are files.

    Of those the arrays have the labels and what is evaluated on.
    """
    if info.defaults.encoded:
        found = load_photographs(plan, parameters)
        return photograph_arrays(found, parameters), found
    arrays = limit_training(data.load(str(info.dataset)), parameters.get("samples", 0))
    return limit_test(arrays, parameters.get("test_samples", 0)), None
