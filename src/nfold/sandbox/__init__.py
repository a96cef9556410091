"""A script's own folder: it sees every file where it is, and writes only into copies.

    folder/root/       the file system as links, made real where the script writes
    folder/journal     what it changed elsewhere, under paths that it named in full; undone later
    folder/touched     every path that it wrote to
    folder/lock        held while a process of the run lives

A rank enters it before the script begins; the parent settles it when the run has ended, however
it ended. Standard library alone: nothing here knows PyTorch.
"""

from __future__ import annotations

from nfold.sandbox.sandbox import Sandbox, WriteReport, clean_up, clean_up_stale, enter_sandbox

__all__ = ["Sandbox", "WriteReport", "clean_up", "clean_up_stale", "enter_sandbox"]
