"""Fingerprints of scripts: hashes of their files, imports, settings and environment.

Nothing is imported or run. Files are found as Python finds them, and names are read from them.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec, PathFinder

from nfold.core.redaction import redact_variables
from nfold.core.source_location import is_user_code

MAX_HASHED_BYTES = 2**20  # of a larger file, usually data, size and date are hashed
SETTINGS_FILE = re.compile(rb"""["']([\w./-]+\.(?:cfg|conf|ini|json|py|toml|yaml|yml))["']""")
LIBRARY_VARIABLE_PREFIXES = (
    "ACCELERATE_", "CUBLAS", "CUDA_", "CUDNN", "GLOO_", "GOMP_", "JAX_", "KERAS_", "KMP_",
    "LD_PRELOAD", "MALLOC_", "MKL_", "NCCL_", "NVIDIA_TF32_OVERRIDE", "OMP_", "OPENBLAS_",
    "PYTORCH_", "TF_CUDNN_", "TF_DETERMINISTIC_OPS", "TF_ENABLE_ONEDNN_OPTS", "TF_FORCE_GPU_",
    "TF_GPU_", "TF_NUM_INTEROP_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_XLA_FLAGS",
    "TORCHDYNAMO_", "TORCHINDUCTOR_", "TORCH_", "TRITON_", "XLA_",
)  # fmt: skip
"""Prefixes of variables that configure libraries. ``TF_`` alone is Terraform's, too."""
READ_AT_START = ("LD_", "PYTHON")
"""Prefixes of variables that only the start of a process reads."""
READ_AFTER_IMPORT = ("ACCELERATE_", "CUDA_", "GLOO_", "NCCL_")
"""Prefixes of variables that a library reads when it is used, for example when a GPU starts."""
IGNORED_VARIABLE = re.compile(
    r"NCCL_DEBUG(?:_FILE|_SUBSYS)?|\w+_(?:DIR|HOME|LOGS|LOG_LEVEL|PATH|ROOT)"
)  # folders and logs of libraries
TERMINAL_VARIABLES = frozenset(
    ("COLUMNS", "HOSTNAME", "LINES", "OLDPWD", "PWD", "SHLVL", "TERM", "TMPDIR")
)  # differ between terminals and do not affect a training
IMPORT_STATEMENT = re.compile(
    rb"""(?:^|[:;])[ \t]*import[ \t]+([A-Za-z_][\w., \t]*)"""
    rb"""|(?:^|[:;])[ \t]*from[ \t]+([A-Za-z_][\w.]*)[ \t]+import"""
    rb"""|import_module\(\s*["']([A-Za-z_][\w.]*)""",
    re.MULTILINE,
)
QUOTED_FOLDER = re.compile(rb"""["']([\w./-]+)["']""")
MAX_PARENT_FOLDERS = 3  # above the code, that it may add to the search path
QUOTED_VARIABLE = re.compile(rb"""["']([A-Z][A-Z0-9_]+)["']""")


def module_file(name: str, folder: str) -> str | None:
    """Return the file that ``python -m name`` runs in a folder, or None."""
    spec = _find_module(name, folder)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = _find_submodule(spec, "__main__")
    return _source(spec)


def imported_file(name: str, folder: str) -> str | None:
    """Return the file that ``import name`` runs in a folder, or None."""
    return _source(_find_module(name, folder))


def different_library_variables(
    before: Mapping[str, str], after: Mapping[str, str], *, is_same_process: bool
) -> list[str]:
    """Return the variables that can make an import differ and that differ, ordered by name.

    Variables that only the start of a process reads do not count in the same process.
    """
    read_at_start = () if is_same_process else READ_AT_START
    names = {
        name
        for name in {*before, *after}
        if name.startswith(read_at_start)
        or (
            name.startswith(LIBRARY_VARIABLE_PREFIXES)
            and not name.startswith(READ_AFTER_IMPORT)
            and not IGNORED_VARIABLE.fullmatch(name)
        )
    }
    return sorted(name for name in names if before.get(name) != after.get(name))


def library_variables(environment: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return the variables that configure libraries, without secrets, ordered by name."""
    return tuple(sorted(redact_variables(_library_variables(environment)).items()))


def compute_fingerprint(
    script: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    *,
    module: str | None = None,
) -> str:
    """Return 16 hex digits of the SHA-256 of everything that determines a script.

    This is its file; all of the user's modules that it imports, with their whole packages; files
    that are named in its arguments, or in its code as settings; and variables of the environment
    that are named in its code or configure libraries. A ``module`` belongs to a package of the
    user's and imports from the working directory. Raises OSError if the script cannot be read.

    Not found: names that are computed at run time, and folders added to ``sys.path`` that are not
    quoted in the code or are far from it.
    """
    folder = os.path.dirname(os.path.realpath(script)) if module is None else os.getcwd()
    code = _code(script, folder, set() if module is None else {module.partition(".")[0]})
    named = {part for argument in arguments for part in (argument, argument.partition("=")[2])}
    for text in code.values():
        settings = set(map(os.fsdecode, SETTINGS_FILE.findall(text)))
        named |= settings | {os.path.join(folder, name) for name in settings}
    parts = {
        "code": {os.path.relpath(file, folder): _hash(text) for file, text in code.items()},
        "files": {file: state for file in named if (state := _file_state(file)) is not None},
        "environment": _variables(code.values(), environment),
    }
    ordered = [(kind, sorted(values.items())) for kind, values in parts.items()]
    return _hash(repr(ordered).encode())[:16]


def _code(script: str, folder: str, imported: set[str]) -> dict[str, bytes]:
    path = os.path.realpath(script)
    with open(script, "rb") as file:
        found = {path: file.read()}
    folders = _search_folders(path, found[path])
    todo, seen, missing = imported | _imports(found[path]), set[str](), set[str]()
    while todo:
        name = min(todo)
        todo.remove(name)
        seen.add(name)
        spec = _find_spec(name, folder, folders)
        if spec is None:
            missing.add(name)
            continue
        for path in _files(spec):
            text = None if path in found else _content(path)
            if text is not None:
                found[path] = text
                todo |= _imports(text) - seen
                more = [added for added in _search_folders(path, text) if added not in folders]
                folders += more
                todo |= missing if more else set()
    return found


def _search_folders(path: str, text: bytes) -> list[str]:
    if b"sys.path" not in text:  # the code may add folders to the search path
        return []
    bases = [os.getcwd(), os.path.dirname(path)]
    for _ in range(MAX_PARENT_FOLDERS):
        bases.append(os.path.dirname(bases[-1]))
    names = [os.fsdecode(name) for name in dict.fromkeys(QUOTED_FOLDER.findall(text))]
    inside = [os.path.join(base, name) for base in bases for name in names]
    return [
        path for path in dict.fromkeys(map(os.path.realpath, bases + inside)) if os.path.isdir(path)
    ]


def _imports(text: bytes) -> set[str]:
    # Text that looks like an import names a missing module, or adds a file.
    lists = (b"".join(found).decode() for found in IMPORT_STATEMENT.findall(text))
    parts = (part.split() for names in lists for part in names.split(","))
    return {part[0].partition(".")[0] for part in parts if part}


def _files(spec: ModuleSpec) -> Iterator[str]:
    for location in spec.submodule_search_locations or ():
        yield from _package_files(location)
    if spec.has_location and spec.origin and is_user_code(spec.origin):
        yield os.path.realpath(spec.origin)


def _find_module(name: str, folder: str) -> ModuleSpec | None:
    first, *parts = name.split(".")
    spec = _find_spec(first, folder)
    for part in parts:
        spec = spec and _find_submodule(spec, part)
    return spec


def _source(spec: ModuleSpec | None) -> str | None:
    file = spec.origin if spec is not None and spec.has_location else None
    return file if file is not None and file.endswith(".py") else None


def _find_spec(name: str, folder: str, searched: Sequence[str] = ()) -> ModuleSpec | None:
    own = PathFinder.find_spec(name, [folder])
    if own is not None and own.has_location:
        return own
    if name in sys.stdlib_module_names:
        return None
    with suppress(AttributeError, ImportError, ValueError):
        own = importlib.util.find_spec(name) or own
    if own is not None:
        return own
    found = PathFinder.find_spec(name, [*searched])
    return found if found is not None and found.has_location else None


def _find_submodule(package: ModuleSpec, part: str) -> ModuleSpec | None:
    within = package.submodule_search_locations
    return None if within is None else PathFinder.find_spec(part, [*within])


def _package_files(folder: str) -> Iterator[str]:
    for parent, folders, names in os.walk(os.path.realpath(folder)):
        if not is_user_code(os.path.join(parent, "__init__.py")):
            return
        folders[:] = [name for name in folders if name.isidentifier() and name != "__pycache__"]
        yield from (os.path.join(parent, name) for name in names if name.endswith(".py"))


def _variables(code: Iterable[bytes], environment: Mapping[str, str]) -> dict[str, str]:
    named = {
        name.decode() for text in code for name in QUOTED_VARIABLE.findall(text)
    } - TERMINAL_VARIABLES
    return _library_variables(environment) | {
        name: value
        for name, value in environment.items()
        if name in named and not name.startswith("NFOLD_")
    }


def _library_variables(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(LIBRARY_VARIABLE_PREFIXES) and not IGNORED_VARIABLE.fullmatch(name)
    }


def _file_state(path: str) -> str | None:
    if not os.path.isfile(path):
        return None
    stat = os.stat(path)
    if stat.st_size > MAX_HASHED_BYTES:
        return f"{stat.st_size} {stat.st_mtime_ns}"
    text = _content(path)
    return None if text is None else _hash(text)


def _content(path: str) -> bytes | None:
    with suppress(OSError), open(path, "rb") as file:
        return file.read()
    return None


def _hash(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()
