"""Describe a user workload, in a child process.

    python -P -m nfold.workloads.describe MODULE:FUNCTION

Imports the module, calls the function with its defaults and prints ``UserWorkloadInfo`` or
``{"error": ...}`` as JSON. Output of the module goes to standard error.
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
    die_with_parent()
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    answer: Any
    try:
        answer = serialize(describe(Workload(name=sys.argv[1])))
    except UsageError as error:
        answer = {"error": str(error)}
    output.write(json.dumps(answer))
    output.close()


def describe(workload: Workload) -> UserWorkloadInfo:
    """Call the workload's function with its defaults, and create the optimizer as a check."""
    function = user_workload.load_function(workload)
    parameters = user_workload.integer_parameters(workload, function)
    loaded = user_workload.call_user_workload(workload)
    training = loaded.training
    with user_workload.translate_user_errors(workload):
        training.optimizer(training.model)
    return UserWorkloadInfo(
        code=user_workload.code_digest(workload),
        summary=(inspect.getdoc(function) or "").split("\n")[0],
        parameters=parameters,
        samples=len(loaded.train[0]),
        data_bytes=sum(array.nbytes for array in loaded.train),
        parameter_count=sum(parameter.numel() for parameter in training.model.parameters()),
        batch=training.batch,
        epochs=training.epochs,
        augmentation=training.augmentation,
    )


if __name__ == "__main__":
    main()
