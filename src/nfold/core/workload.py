"""A workload, what is trained, as a value that is written on one line."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nfold.core import fingerprint
from nfold.core.errors import UsageError
from nfold.core.redaction import abbreviate_home, expand_home, hide_secrets, redact_arguments

IDENTIFIER = r"[A-Za-z_]\w*"
FUNCTION_REFERENCE = rf"{IDENTIFIER}(?:\.{IDENTIFIER})*:{IDENTIFIER}"
MODULE_FLAG = "-m"  # before the name of a module, as for Python
WORKLOAD_PATTERN = re.compile(rf"({FUNCTION_REFERENCE}|[a-z][a-z0-9_]*)(?::(.+))?", re.ASCII)
PARAMETER_PATTERN = re.compile(rf"({IDENTIFIER})=(-?[0-9]{{1,18}})", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A built-in workload, a function of the user's, or an unmodified script.

    Written as ``name`` or ``name:key=value,key=value``, for example ``wide_resnet:depth=16``; a
    script is written as the command that runs it. The catalogue, ``nfold.workloads``, checks names
    and parameters.

    Attributes:
        name: built-in name, ``package.module:function``, or the name of a script or module.
        parameters: integers that differ from the defaults, ordered by name.
        code: fingerprint of the user's file, or of a script with everything it depends on
            (``nfold.core.fingerprint``), 16 hex digits. Not in the written form.
        imports: fingerprint of everything that the user's file imports. Not in the written form.
        variables: environment variables that configure libraries. Not in the written form.
        script: path and arguments of a script, or ``-m``, a module and its arguments.
    """

    name: str
    parameters: tuple[tuple[str, int], ...] = ()
    code: str = ""
    imports: str = ""
    variables: tuple[tuple[str, str], ...] = ()
    script: tuple[str, ...] = ()

    @classmethod
    def from_script(cls, path: str, *arguments: str) -> Workload:
        """Return the script at ``path``. Raises UsageError if it cannot be read."""
        try:
            code = fingerprint.compute_fingerprint(path, arguments, os.environ)
        except OSError as error:
            raise UsageError(
                f"script {path!r} cannot be read ({error.strerror}); allowed is a Python file; "
                "next: give its path, relative to this folder"
            ) from None
        return cls(name=Path(path).name, code=code, script=(path, *arguments))

    @classmethod
    def from_module(cls, name: str, *arguments: str) -> Workload:
        """Return the module that ``python -m name`` runs here. Raises UsageError if none exists."""
        file = fingerprint.module_file(name, os.getcwd())
        if file is None:
            raise UsageError(
                f"module {name!r} is not found from this folder; allowed are Python modules that "
                f"python -m runs; next: python -m {name}"
            )
        code = fingerprint.compute_fingerprint(file, arguments, os.environ, module=name)
        return cls(name=name, code=code, script=(MODULE_FLAG, name, *arguments))

    @classmethod
    def parse(cls, text: str) -> Workload:
        """Parse the written form. Raises UsageError for any other text."""
        form = WORKLOAD_PATTERN.fullmatch(text)
        if form is None:
            raise UsageError(_malformed(text))
        found: dict[str, int] = {}
        for part in form[2].split(",") if form[2] else ():
            match = PARAMETER_PATTERN.fullmatch(part.strip())
            if match is None:
                raise UsageError(_malformed(text))
            if match[1] in found:
                raise UsageError(f"workload {text!r} gives {match[1]!r} twice")
            found[match[1]] = int(match[2])
        return cls(name=form[1], parameters=tuple(sorted(found.items())))

    @property
    def module(self) -> str | None:
        """The module of a script, None if it is run by its path."""
        return self.script[1] if self.script[:1] == (MODULE_FLAG,) else None

    @property
    def script_file(self) -> str:
        """The file of a script or module as it was given or found; empty for other workloads."""
        if self.module is not None:
            return fingerprint.module_file(self.module, os.getcwd()) or ""
        return self.script[0] if self.script else ""

    @property
    def function_reference(self) -> tuple[str, str] | None:
        """Module and function of a user's workload, else None."""
        module, separator, function = self.name.partition(":")
        return (module, function) if separator and not self.script else None

    @property
    def for_checkpoints(self) -> Workload:
        """The identity of checkpoints, which are continued after changes to imported files."""
        return dataclasses.replace(self, imports="", variables=())

    @property
    def identity(self) -> str:
        """The written form that ``cell_id`` hashes. It is the same before and after ``redact``."""
        if self.script:
            return shlex.join(map(expand_home, hide_secrets(self.script)))
        return str(self)

    def redact(self) -> Workload:
        """The same workload without secrets and home folder, as it is stored and reported."""
        return dataclasses.replace(self, script=redact_arguments(self.script))

    def __str__(self) -> str:
        if self.script:
            return abbreviate_home(self.identity)
        written = ",".join(f"{key}={value}" for key, value in self.parameters)
        return f"{self.name}:{written}" if written else self.name

    def with_parameters(self, **changes: int) -> Workload:
        merged = {**dict(self.parameters), **changes}
        return dataclasses.replace(self, parameters=tuple(sorted(merged.items())))


def _malformed(text: str) -> str:
    return (
        f"workload {text!r} is malformed: allowed are NAME and MODULE:FUNCTION, followed by "
        ":KEY=INTEGER,... for parameters; for example wide_resnet:depth=16,width=4"
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Training:
    """A model, its data, loss and optimizer, for ``nfold train my_module:function``.

    ``train`` and ``test`` are pairs (samples, targets) of NumPy arrays or tensors [n, ...] on the
    CPU. uint8 images [n, h, w, c] of 1 to 4 channels become float [n, c, h, w], normalised by the
    channels of the training images; float64 becomes float32; other types are unchanged.
    ``optimizer`` is a function of the model. ``loss(outputs, targets)`` returns the mean over the
    samples, [] (default: cross entropy). ``augmentation`` applies to images:
    ``("crop", 4), ("flip", 0), ("cutout", 8)``. ``batch`` and ``epochs`` are defaults for options
    and nfold.toml.
    """

    model: Any
    train: tuple[Any, Any]
    optimizer: Callable[[Any], Any]
    test: tuple[Any, Any] | None = None
    loss: Callable[[Any, Any], Any] | None = None
    augmentation: tuple[tuple[str, int], ...] = ()
    batch: int = 128
    epochs: int = 1
