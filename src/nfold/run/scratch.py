"""A script's scratch folder in its measurement's: entered by each rank, settled by the parent."""

from __future__ import annotations

import dataclasses
import os

from nfold.frameworks.base import Task
from nfold.frameworks.scratch import clean_up
from nfold.frameworks.scratch import enter_sandbox as enter_sandbox_folder
from nfold.measurement import Caveat
from nfold.run.handoff import HandoffFolder
from nfold.sources import module_file

SANDBOX_NAME = "scratch"


def enter_sandbox(task: Task, folder: HandoffFolder) -> Task:
    """Enter it where the task is a script, which then has the path to run it by there.

    Ranks share one, as they share the working directory; copies that are alone have their own.
    """
    if not task.workload.script:
        return task
    alone = f"-{task.rank}" if task.variant.independent else ""
    module, here = task.workload.module, os.getcwd()
    scratch = enter_sandbox_folder(folder.path / f"{SANDBOX_NAME}{alone}")
    path, *arguments = task.workload.script
    if module is None:
        path = scratch.prepare_script(path)
    elif (file := module_file(module, here)) is not None:
        scratch.prepare_script(file)
    there = dataclasses.replace(task.workload, script=(path, *arguments))
    return dataclasses.replace(task, workload=there)


def settle_sandbox(folder: HandoffFolder) -> list[Caveat]:
    """Clear it away; what the script would have written, and what could not be undone."""
    found = [clean_up(path) for path in sorted(folder.path.glob(f"{SANDBOX_NAME}*"))]
    wrote = next((str(touched) for touched in found if touched.files), None)
    failed = [text for touched in found for text in touched.restore_errors]
    doubts = [Caveat(kind="would_have_written", text=wrote)] if wrote else []
    return doubts + [Caveat(kind="not_undone", text=text) for text in failed]
