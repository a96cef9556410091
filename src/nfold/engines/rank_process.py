"""Run a rank in its process: on its CPU cores, an operation or a script. Imports no framework."""

from __future__ import annotations

import importlib
import importlib.util
import os
import runpy
import sys
import types
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

from nfold import workloads
from nfold.core.measurement import RankSamples
from nfold.core.plan import Plan
from nfold.engines.base import Observer, Phase, Task


@contextmanager
def pin_to_cores(plan: Plan, local_rank: int, devices: int = 1) -> Iterator[None]:
    """Bind this process to the cores of ``devices`` CPU devices; does nothing on GPUs.

    A CPU device has the same number of cores in every cell of a grid, so that one device and two
    can be compared. Enter before importing the framework: its thread pools take their size from
    OMP_NUM_THREADS and from the allowed cores.
    """
    if plan.device != "cpu" or not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    share = devices * (plan.cores_per_device or 1)
    os.environ["OMP_NUM_THREADS"] = str(share)
    os.sched_setaffinity(0, core_share(sorted(before), share, local_rank))
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def core_share(cores: list[int], share: int, index: int) -> list[int]:
    found = cores[index * share : (index + 1) * share]
    if len(found) < share:
        raise ValueError(f"CPU device {index} of {share} cores does not fit into {cores}")
    return found


def run_operation(
    task: Task,
    observer: Observer,
    library: str,
    devices: Sequence[Any],
    describe: Callable[[], str],
    barrier: Callable[[], None] = lambda: None,
    memory: Callable[[], dict[str, Any]] | None = None,
) -> RankSamples:
    """Run one rank of an operation in a library; ``memory`` replaces its own peak of memory."""
    definition = importlib.import_module(f"nfold.workloads.{task.workload.name}.{library}")

    def beat(done: int, planned: int) -> None:
        observer.beat(Phase.STEPPING if done else Phase.FIRST_STEP, done, planned)

    own_task = definition.Task(
        parameters=workloads.parameters(task.workload),
        plan=task.plan,
        rank=task.rank,
        world_size=task.world_size,
        devices=devices,
        barrier=barrier,
        beat=beat,
        variant=task.variant,
    )
    peak = () if memory is None else (lambda: memory()["peak_memory_bytes"],)
    result = definition.run_parts(own_task, *peak)
    return RankSamples(
        rank=task.rank,
        device=describe(),
        first_step_ms=result.first_step_ms,
        warmup_steps=task.plan.warmup_steps or 0,
        windows=result.windows,
        parts=result.parts,
        peak_memory_bytes=result.peak_memory_bytes,
        reserved_memory_bytes=memory()["reserved_memory_bytes"] if memory else None,
    )


CompileSource = Callable[[bytes, str], CodeType]  # source and path of a file -> its code


def compile_source(source: bytes, path: str) -> CodeType:
    return compile(source, path, "exec", dont_inherit=True)


def run_script(script: str, arguments: list[str], compiler: CompileSource = compile_source) -> None:
    """Run a file, or a folder or archive with a ``__main__.py``, as ``python script`` does.

    Does not use runpy for a source file: at its end runpy removes the module from ``__main__``,
    where exit handlers and other threads still need it, and it sets a relative ``__file__``.
    """
    sys.argv = [script, *arguments]
    path = os.path.join(os.getcwd(), script)
    if os.path.isdir(path) or zipfile.is_zipfile(path) or path.endswith(".pyc"):
        runpy.run_path(path, run_name="__main__")
        return
    sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    _run_as_main(types.ModuleType("__main__"), SourceFileLoader("__main__", path), compiler)


def run_module(module: str, arguments: list[str], compiler: CompileSource = compile_source) -> None:
    """Run a module, or the main module of a package, as ``python -m module`` does."""
    sys.argv = [module, *arguments]
    sys.path.insert(0, os.getcwd())
    spec = importlib.util.find_spec(module)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{module}.__main__")
    if spec is None or not isinstance(spec.loader, SourceFileLoader):
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        return
    sys.argv[0] = spec.loader.path
    main_module = types.ModuleType("__main__")
    main_module.__spec__, main_module.__package__ = spec, spec.parent
    _run_as_main(main_module, spec.loader, compiler)


def _run_as_main(
    main_module: types.ModuleType, loader: SourceFileLoader, compiles: CompileSource
) -> None:
    path = loader.path
    code = compiles(Path(path).read_bytes(), path)
    main_module.__file__, main_module.__loader__ = path, loader
    main_module.__dict__["__builtins__"] = sys.modules["builtins"]
    sys.modules["__main__"] = main_module
    exec(code, main_module.__dict__)  # noqa: S102


def run_program(program: str, arguments: list[str]) -> None:
    os.execvp(program, [program, *arguments])  # noqa: S606


RUNNERS: dict[str, Callable[[str, list[str]], None]] = {
    "script": run_script,
    "module": run_module,
    "program": run_program,
}
