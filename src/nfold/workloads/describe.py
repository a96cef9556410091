"""Says what a user's own workload is: the process that the parent asks.

    python -P -m nfold.workloads.describe MODULE:FUNCTION

imports the module, calls the function with its defaults and prints one JSON object, which is
``Described`` or ``{"error": ...}``. What the module itself prints goes to standard error.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
from typing import Any

from nfold.core.errors import UsageError
from nfold.core.parent_death import die_with_parent
from nfold.core.serialization import serialize
from nfold.core.workload import Workload
from nfold.workloads import user_workload
from nfold.workloads.workload_info import UserWorkloadInfo


def main() -> None:
    """Entry of the process: its standard output is for the JSON object alone."""
    die_with_parent()
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    answer.write(json.dumps(_answer(sys.argv[1])))
    answer.close()


def _answer(name: str) -> Any:
    try:
        return serialize(describe(Workload(name=name)))
    except UsageError as error:
        return {"error": str(error)}


def describe(workload: Workload) -> UserWorkloadInfo:
    """Call the workload's function with its defaults, make the optimizer, say what there is."""
    function = user_workload.load_function(workload)
    parameters = user_workload.integer_parameters(workload, function)
    found = user_workload.call_user_workload(workload)
    training = found.training
    with user_workload.translate_user_errors(workload):
        training.optimizer(training.model)
    return UserWorkloadInfo(
        code=user_workload.code_digest(workload),
        summary=(inspect.getdoc(function) or "").split("\n")[0],
        parameters=parameters,
        samples=len(found.train[0]),
        data_bytes=sum(array.nbytes for array in found.train),
        parameter_count=sum(parameter.numel() for parameter in training.model.parameters()),
        batch=training.batch,
        epochs=training.epochs,
        augmentation=training.augmentation,
    )


if __name__ == "__main__":
    main()
