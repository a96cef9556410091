"""The modules that a script has imported from packages, to import them before its next runs."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType

from nfold.core.fingerprint import different_library_variables
from nfold.core.script_profile import LoadedLibraries
from nfold.core.source_location import is_in_package

STARTING_PROCESSES = ("torch._inductor", "triton")
"""Packages that start processes or threads when they are imported."""


def loaded_libraries() -> LoadedLibraries:
    """Return the modules of this process from packages, and the variables that it has changed."""
    found = []
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) if isinstance(module, ModuleType) else None
        if file and module.__name__ == name and is_in_package(file):
            found.append(name)
    changed = different_library_variables(_started_environment(), os.environ, is_same_process=True)
    return LoadedLibraries(
        modules=tuple(name for name in found if not _is_in(name, STARTING_PROCESSES)),
        variables=tuple((name, os.environ.get(name, "")) for name in changed),
    )


def _is_in(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def _started_environment() -> dict[str, str]:
    """Return the environment that this process was started with (Linux, else that of now)."""
    try:
        entries = Path("/proc/self/environ").read_bytes().split(b"\0")
    except OSError:
        return dict(os.environ)
    pairs = (os.fsdecode(entry).partition("=") for entry in entries if entry)
    return {name: value for name, _, value in pairs}
