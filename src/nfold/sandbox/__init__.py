"""Copy-on-write working directory for a user's script.

Where the machine allows it, the script runs in a view of the file system whose writes go to
``folder/upper*`` (``overlay``). Otherwise it runs in a mirror; backups of files that it changes under
absolute paths are in a journal in the user's cache folder, and are undone later:

    folder/root*       the file system as links; a file becomes a copy when the script writes to it
    folder/touched*    every path that the script wrote to
    folder/lock        in both cases: held while a process of the run is alive
    folder/refused     why the script was not allowed to change a file

Each rank enters the sandbox before the script starts; the parent cleans it up when the run has
ended, however it ended. Uses the standard library only.
"""

from __future__ import annotations

from nfold.sandbox.file_claims import restore_command
from nfold.sandbox.sandbox import (
    Sandbox,
    WriteReport,
    clean_up,
    clean_up_stale,
    enter_sandbox,
    enter_view,
    guard_view,
    needs_restore,
    unprotected_reason,
)

__all__ = [
    "Sandbox",
    "WriteReport",
    "clean_up",
    "clean_up_stale",
    "enter_sandbox",
    "enter_view",
    "guard_view",
    "needs_restore",
    "restore_command",
    "unprotected_reason",
]
