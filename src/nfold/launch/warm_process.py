"""A process that has imported the libraries of a script, and starts the agents of its runs by fork.

The libraries are those that the probe run had imported from packages. While the probe run is not yet
over, they are those that the code of the script names. A rank is forked only if it would have
imported the same: the probe run has imported all of them, no variable that configures libraries
differs from those of the waiting process, and nothing in it has started a thread, a process or a
GPU. Otherwise the rank is started as a new program.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import os
import pkgutil
import signal
import sys
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import psutil

from nfold.core.fingerprint import different_library_variables
from nfold.core.source_location import is_in_package
from nfold.instrument.loaded_libraries import loaded_libraries
from nfold.launch import workload_process
from nfold.launch.launch_spec import WarmRequest
from nfold.launch.process_tree import ForkedProcess

NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""With it, torch.cuda.is_available() asks the driver without starting a GPU in this process."""
THREADS_THAT_FORK = ("jemalloc_bg_thd",)
"""Names of threads whose library prepares itself for forks: jemalloc, which pyarrow has."""
LOADED_BY_OPTIMIZERS = "torch._dynamo"
"""A module that PyTorch imports when a process constructs its first optimizer."""
RESET_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
ADOPTION_POLL_S = 0.001


def import_libraries(names: Iterable[str]) -> None:
    """Import modules, in this order; what cannot be imported now is left to the script."""
    for name in names:
        with contextlib.suppress(Exception, SystemExit):
            importlib.import_module(name)


def import_libraries_of(script: str) -> frozenset[str]:
    """Import what the code of a script imports from packages; return the modules that came with it."""
    before = frozenset(sys.modules)
    for name in (*_imported_names(script), LOADED_BY_OPTIMIZERS):
        with contextlib.suppress(Exception, SystemExit):
            found = importlib.util.find_spec(name.partition(".")[0])
            if found is not None and found.origin and is_in_package(found.origin):
                pkgutil.resolve_name(name)
    return frozenset(loaded_libraries().modules) - before


def _imported_names(script: str) -> list[str]:
    """Return what every run of a script imports, such as ``transformers.Trainer``, in order."""
    try:
        body = ast.parse(Path(script).read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return []
    names: list[str] = []
    for statement in body:
        if isinstance(statement, ast.Import):
            names += [each.name for each in statement.names]
        elif isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
            named = [each.name for each in statement.names if each.name != "*"]
            names += [statement.module, *(f"{statement.module}.{name}" for name in named)]
    return names


def different_variables(started: Mapping[str, str], request: WarmRequest) -> str:
    """Return which variables of this run differ from those that the imports had; empty if none does.

    ``started`` is the environment of this process before all imports.
    """
    environment = request.environment
    if changed := different_library_variables(started, environment, is_same_process=False):
        return f"{', '.join(changed)} changed since the imports"
    own = [name for name, value in request.libraries.variables if os.environ.get(name) != value]
    return f"the script sets {', '.join(own)}" if own else ""


def reason_against_forks(request: WarmRequest, imported_before: Collection[str]) -> str:
    """Return why no fork of this process can be a rank; empty if one can.

    ``imported_before`` are modules that it imported for other runs, or before those of the probe run
    were known.
    """
    if other := sorted({*imported_before} - {*request.libraries.modules}):
        return f"the script has not imported {', '.join(other[:3])}"
    if children := psutil.Process().children():
        return f"an import started processes: {', '.join(one.name() for one in children)}"
    pid = os.fork()
    if pid == 0:
        os._exit(int(_cannot_use_gpus()))
    if os.waitpid(pid, 0)[1]:
        return "an import started a GPU"
    # OpenBLAS, which numpy has, ends its threads before a fork, and starts them when it needs them.
    threads = _other_threads()
    return f"an import started threads: {', '.join(threads)}" if threads else ""


def _other_threads() -> list[str]:
    """Return the names of the threads that a forked process would lack (Linux)."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        if task.name != str(os.getpid()):
            with contextlib.suppress(FileNotFoundError):  # it has ended
                names.append((task / "comm").read_text().strip())
    return [name for name in names if name not in THREADS_THAT_FORK]


def _cannot_use_gpus() -> bool:
    """Return whether this process is a fork of one that has started a GPU."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda._is_in_bad_fork()


def fork_orphan() -> int:
    """Fork a process that the nearest ancestor adopts (``adopt_orphans``).

    Returns its id here, and 0 in the new process, as soon as it is adopted.
    """
    reading, writing = os.pipe()
    between = os.fork()
    if between:
        os.close(writing)
        os.waitpid(between, 0)
        with os.fdopen(reading) as pipe:
            return int(pipe.read())
    os.close(reading)
    between = os.getpid()
    if pid := os.fork():
        os.write(writing, str(pid).encode())
        os._exit(0)
    os.close(writing)
    os.setsid()
    while os.getppid() == between:
        time.sleep(ADOPTION_POLL_S)
    return 0


def is_rank(command: Sequence[str]) -> bool:
    """Return whether ``command`` runs a rank of a workload."""
    return workload_process.__name__ in command


def become_rank(command: Sequence[str]) -> NoReturn:
    """Run the rank of ``command`` in this process, which ends with it."""
    place = list(command).index(workload_process.__name__)
    sys.argv = list(command[place:])
    _reseed()
    workload_process.main()
    os._exit(0)  # main does not return


def _reseed() -> None:
    # Ranks that start as new programs have different random numbers; Python reseeds its own.
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()


class ForkedRank(ForkedProcess):
    """A rank that is a fork of this process; torchelastic takes it for a Popen."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        super().__init__(os.fork())
        self.args = command
        if self.pid == 0:
            try:
                os.setsid()
                for signum in RESET_SIGNALS:
                    signal.signal(signum, signal.SIG_DFL)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                if _cannot_use_gpus():
                    os.execve(command[0], list(command), dict(environment))  # noqa: S606
                os.environ.clear()
                os.environ.update(environment)
                become_rank(command)
            finally:
                os._exit(1)
