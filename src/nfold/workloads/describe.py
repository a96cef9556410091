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

from nfold.errors import UsageError
from nfold.lifeline import die_with_parent
from nfold.plain import to_plain
from nfold.workload import Workload
from nfold.workloads import own
from nfold.workloads.described import Described


def main() -> None:
    """Entry of the process: its standard output is for the JSON object alone."""
    die_with_parent()
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    answer.write(json.dumps(_answer(sys.argv[1])))
    answer.close()


def _answer(name: str) -> Any:
    try:
        return to_plain(describe(Workload(name=name)))
    except UsageError as error:
        return {"error": str(error)}


def describe(workload: Workload) -> Described:
    """Call the workload's function with its defaults, make the optimizer, say what there is."""
    function = own.function_of(workload)
    parameters = own.parameters_of(workload, function)
    found = own.called(workload)
    training = found.training
    with own.theirs(workload):
        training.optimizer(training.model)
    return Described(
        code=own.code_of(workload),
        summary=(inspect.getdoc(function) or "").split("\n")[0],
        parameters=parameters,
        samples=len(found.train[0]),
        data_bytes=sum(array.nbytes for array in found.train),
        weights=sum(parameter.numel() for parameter in training.model.parameters()),
        batch=training.batch,
        epochs=training.epochs,
        augmentation=training.augmentation,
    )


if __name__ == "__main__":
    main()
