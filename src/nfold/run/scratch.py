"""A script's scratch folder in its measurement's: entered by each rank, settled by the parent."""

from __future__ import annotations

import dataclasses
import os

from nfold.frameworks.base import Task
from nfold.frameworks.scratch import entered, settled
from nfold.measurement import Doubt
from nfold.run.handoff import Folder
from nfold.sources import module_file

NAME = "scratch"


def in_scratch(task: Task, folder: Folder) -> Task:
    """Enter it where the task is a script, which then has the path to run it by there.

    Ranks share one, as they share the working directory; copies that are alone have their own.
    """
    if not task.workload.script:
        return task
    alone = f"-{task.rank}" if task.left_out.independent else ""
    module, here = task.workload.module, os.getcwd()
    scratch = entered(folder.path / f"{NAME}{alone}")
    path, *arguments = task.workload.script
    if module is None:
        path = scratch.script(path)
    elif (file := module_file(module, here)) is not None:
        scratch.script(file)
    there = dataclasses.replace(task.workload, script=(path, *arguments))
    return dataclasses.replace(task, workload=there)


def settle(folder: Folder) -> list[Doubt]:
    """Clear it away; what the script would have written, and what could not be undone."""
    found = [settled(path) for path in sorted(folder.path.glob(f"{NAME}*"))]
    wrote = next((str(touched) for touched in found if touched.files), None)
    failed = [text for touched in found for text in touched.failed]
    doubts = [Doubt(kind="would_have_written", text=wrote)] if wrote else []
    return doubts + [Doubt(kind="not_undone", text=text) for text in failed]
