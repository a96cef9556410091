"""``nfold env``: what this machine has, and what on it will hold training back.

Everything heavy is imported when the command runs: ``nfold --help`` must not wait for it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from nfold.cli import terminal
from nfold.core.format import terminal_safe

if TYPE_CHECKING:
    from rich.console import Console

    from nfold.core.machine import Machine
    from nfold.telemetry.obstacles import Obstacle

WIDTH = 100
ENV_SCHEMA_VERSION = 1


def env_command(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """What this machine has, and what on it will hold training back."""
    from nfold.telemetry.machine_inspection import inspect_machine
    from nfold.telemetry.nvml import Nvml
    from nfold.telemetry.obstacles import find_obstacles, gather_facts

    with Nvml() as nvml:
        machine = inspect_machine(nvml)
        found = find_obstacles(machine, gather_facts(nvml))
    if as_json:
        typer.echo(json.dumps(env_document(machine, found), indent=2))
    else:
        print_machine(machine, found, terminal.make_console())


def env_document(machine: Machine, found: Iterable[Obstacle]) -> dict[str, object]:
    """The versioned JSON object."""
    return {
        "schema": ENV_SCHEMA_VERSION,
        "machine": machine.to_dict(),
        "obstacles": [dataclasses.asdict(obstacle) for obstacle in found],
    }


def print_machine(machine: Machine, found: Sequence[Obstacle], console: Console) -> None:
    """Print everything, at most as wide as the console."""
    _show_title("This machine", console)
    _show_grid([[label, value] for label, value in describe_machine(machine)], console)
    if machine.gpus:
        _show_title("GPUs", console)
        _show_grid(gpu_table(machine), console)
    if machine.links:
        _show_title("Links between GPUs", console)
        _show_grid(link_matrix(machine), console)
        _show_grid(link_details(machine), console)
    _show_title("What will hold training back", console)
    for number, obstacle in enumerate(found, start=1):
        source = f"\nknown from: {obstacle.evidence}"
        _show_grid([[f"{number}.", obstacle.text + source]], console)
    if not found:
        _show_grid([["Nothing was found."]], console)


def describe_machine(machine: Machine) -> list[tuple[str, str]]:
    """The machine as (label, value) lines; an empty value says that there is none."""
    limits = (f"{name.replace('_', ' ')} {value}" for name, value in machine.limits.items())
    versions = (f"{name} {version}" for name, version in machine.versions.items())
    return [
        ("CPU", f"{machine.cpu}, {machine.cores} usable cores"),
        ("Memory", format_gib(machine.memory_bytes)),
        ("/dev/shm", format_gib(machine.shm_bytes)),  # noqa: S108
        ("System", machine.os),
        ("Python", machine.python),
        ("NVIDIA driver", machine.driver or "none"),
        ("Versions", ", ".join(versions) or "no framework is installed"),
        ("Limits", ", ".join(limits)),
    ]


def gpu_table(machine: Machine) -> list[list[str]]:
    """A row per GPU, under a header."""
    rows = [
        [str(gpu.index), gpu.name, format_gib(gpu.memory_bytes), gpu.pcie or "–", gpu.uuid or "–"]
        for gpu in machine.gpus
    ]
    return [["GPU", "name", "memory", "PCIe now", "UUID"], *rows]


def link_matrix(machine: Machine) -> list[list[str]]:
    """How each GPU reaches each other one, as a square with a header."""
    kinds = {(link.first, link.second): link.kind for link in machine.links}
    kinds |= {(second, first): kind for (first, second), kind in kinds.items()}
    places = [gpu.index for gpu in machine.gpus]
    square = [[str(a), *(kinds.get((a, b), "·") for b in places)] for a in places]
    return [["GPU", *map(str, places)], *square]


def link_details(machine: Machine) -> list[list[str]]:
    """What more is known of the links, each kind and detail once."""
    known = {(link.kind, link.detail) for link in machine.links if link.detail}
    return [[kind, detail] for kind, detail in sorted(known)]


def format_gib(size: int | None) -> str:
    """Bytes in GiB, to three digits."""
    return "–" if size is None else f"{size / 2**30:.3g} GiB"


def _show_title(text: str, console: Console) -> None:
    from rich.text import Text

    console.print(Text(f"\n{text}", style="bold"))


def _show_grid(rows: Sequence[Sequence[str]], console: Console) -> None:
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2), pad_edge=True)
    for _ in range(max(map(len, rows), default=0)):
        grid.add_column(overflow="fold")
    for row in rows:
        grid.add_row(*(Text(terminal_safe(cell)) for cell in row))
    console.print(grid)
