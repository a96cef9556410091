"""What is trained, as a value: a name and its parameters, written on one line."""

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
MODULE_FLAG = "-m"
"""What stands before a module's name, as for Python."""
WORKLOAD_PATTERN = re.compile(rf"({FUNCTION_REFERENCE}|[a-z][a-z0-9_]*)(?::(.+))?", re.ASCII)
PARAMETER_PATTERN = re.compile(rf"({IDENTIFIER})=(-?[0-9]{{1,18}})", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A workload's name and the parameters that differ from its defaults, ordered by name.

    ``name`` is a built-in one, or ``package.module:function``, a user's own. The written form is
    ``name`` or ``name:key=value,key=value``, for example ``wide_resnet:depth=16,width=4``.
    Parameters are integers. Whether the name and the parameters exist is the catalogue's to say
    (``nfold.workloads``).

    What another code measured is another result, as is what was measured in another environment:
    neither is written. ``code`` is of a user's own workload: 16 hex digits of its file's SHA-256.
    ``imports`` are as many of all that its file imports, and of what that names
    (``nfold.core.fingerprint.digest``). ``variables`` are those of the environment that steer libraries.

    ``script`` is of a script that is run unchanged: its path and its arguments, or ``-m``, a
    module and its arguments. It is then written as the command that a person types, ``name`` is
    the file's or the module's, and ``code`` is of all that makes it what it is
    (``nfold.core.fingerprint.digest``).
    """

    name: str
    parameters: tuple[tuple[str, int], ...] = ()
    code: str = ""
    imports: str = ""
    variables: tuple[tuple[str, str], ...] = ()
    script: tuple[str, ...] = ()

    @classmethod
    def from_script(cls, path: str, *arguments: str) -> Workload:
        """The script at ``path`` with its arguments; UsageError where it cannot be read."""
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
        """The module that ``python -m name`` would run from here; UsageError where none is."""
        file = fingerprint.module_file(name, os.getcwd())
        if file is None:
            raise UsageError(
                f"module {name!r} is not found from this folder; allowed is what python -m runs, "
                f"in Python; next: python -m {name}"
            )
        code = fingerprint.compute_fingerprint(file, arguments, os.environ, module=name)
        return cls(name=name, code=code, script=(MODULE_FLAG, name, *arguments))

    @classmethod
    def parse(cls, text: str) -> Workload:
        """The workload that ``text`` writes; UsageError where it is not of the form."""
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
        """The module that a script is, None where it is run by its path."""
        return self.script[1] if self.script[:1] == (MODULE_FLAG,) else None

    @property
    def function_reference(self) -> tuple[str, str] | None:
        """The module and the function of a user's own workload, None of a built-in one."""
        module, separator, function = self.name.partition(":")
        return (module, function) if separator and not self.script else None

    @property
    def for_checkpoints(self) -> Workload:
        """As checkpoints know it, which are gone on with after a change to a logger, too."""
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
        """The same workload with some parameters set."""
        merged = {**dict(self.parameters), **changes}
        return dataclasses.replace(self, parameters=tuple(sorted(merged.items())))


def _malformed(text: str) -> str:
    return (
        f"workload {text!r} is not of the form NAME, MODULE:FUNCTION or one of them with "
        ":KEY=INTEGER,...; for example wide_resnet:depth=16,width=4"
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Training:
    """A model, its data, its loss and its optimizer, for ``nfold train my_module:function``.

    ``train`` and ``test`` are pairs (samples, targets) of NumPy arrays or tensors [n, ...] on
    the CPU. uint8 images [n, h, w, c] of 1 to 4 channels reach the model as float [n, c, h, w],
    normalised by the training images' channels; everything else reaches it as it is, float64 as
    float32. ``optimizer`` is a function of the model. ``loss(outputs, targets)`` returns the
    mean over the samples, [] (default: cross entropy). ``augmentation`` is for images:
    ``("crop", 4), ("flip", 0), ("cutout", 8)``. ``batch`` and ``epochs`` hold where neither a
    flag nor nfold.toml says otherwise.
    """

    model: Any
    train: tuple[Any, Any]
    optimizer: Callable[[Any], Any]
    test: tuple[Any, Any] | None = None
    loss: Callable[[Any, Any], Any] | None = None
    augmentation: tuple[tuple[str, int], ...] = ()
    batch: int = 128
    epochs: int = 1
