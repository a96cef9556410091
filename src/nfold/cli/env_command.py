"""``nfold env``: what slows training on this machine, and its hardware."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import typer

from nfold.cli import render, terminal
from nfold.cli.render import TextTable
from nfold.core.format import NO_NUMBER, format_bytes, pluralize
from nfold.telemetry.machine_inspection import inspect_machine
from nfold.telemetry.nvml import Nvml
from nfold.telemetry.obstacles import find_obstacles, gather_facts

if TYPE_CHECKING:
    from rich.console import Console

    from nfold.core.machine import Machine
    from nfold.telemetry.obstacles import Obstacle

ENV_SCHEMA_VERSION = 1


def run_env(*, as_json: bool) -> None:
    """Inspect the machine and print it."""
    with Nvml() as nvml:
        machine = inspect_machine(nvml)
        found = find_obstacles(machine, gather_facts(nvml))
    if as_json:
        typer.echo(json.dumps(env_document(machine, found), indent=2))
    else:
        print_machine(machine, found, terminal.make_console())


def env_document(machine: Machine, found: Iterable[Obstacle]) -> dict[str, object]:
    """Return the versioned JSON object."""
    return {
        "schema": ENV_SCHEMA_VERSION,
        "machine": machine.to_dict(),
        "obstacles": [dataclasses.asdict(obstacle) for obstacle in found],
    }


def print_machine(machine: Machine, found: Sequence[Obstacle], console: Console) -> None:
    """Print obstacles, then the machine, then the GPUs and the links between them."""
    slow = "slows" if len(found) == 1 else "slow"
    head = f"{pluralize(len(found), 'thing')} on this machine {slow} training"
    render.print_text(console, head if found else "Nothing found that slows training", "bold")
    for number, obstacle in enumerate(found, start=1):
        rows = [[f"{number}.", obstacle.text], ["", f"source: {obstacle.evidence}"]]
        render.print_grid(console, rows)
    console.print()
    render.print_grid(console, describe_machine(machine))
    if machine.gpus:
        console.print()
        render.print_table(console, gpu_table(machine))
        for kind, detail in link_details(machine):
            render.print_text(console, f"{kind}: {detail}", "dim")


def describe_machine(machine: Machine) -> list[tuple[str, str]]:
    """Return the machine as (label, value) pairs, without empty values."""
    limits = (f"{name.replace('_', ' ')} {value}" for name, value in machine.limits.items())
    versions = (f"{name} {version}" for name, version in machine.versions.items())
    pairs = [
        ("CPU", f"{machine.cpu}, {machine.cores} usable cores"),
        ("Memory", _bytes(machine.memory_bytes)),
        ("/dev/shm", _bytes(machine.shm_bytes)),  # noqa: S108
        ("System", machine.os),
        ("Python", machine.python),
        ("NVIDIA driver", machine.driver or "none"),
        ("Versions", ", ".join(versions) or "no framework is installed"),
        ("Limits", ", ".join(limits)),
    ]
    return [(label, value) for label, value in pairs if value]


def gpu_table(machine: Machine) -> TextTable:
    """Return a row per GPU, with the kind of its link to every other GPU."""
    kinds = {(link.first, link.second): link.kind for link in machine.links}
    kinds |= {(second, first): kind for (first, second), kind in kinds.items()}
    indices = [gpu.index for gpu in machine.gpus] if machine.links else []
    rows = [
        [
            *(str(gpu.index), gpu.name, _bytes(gpu.memory_bytes), gpu.pcie or NO_NUMBER),
            *(kinds.get((gpu.index, other), "·") for other in indices),
            gpu.uuid or NO_NUMBER,
        ]
        for gpu in machine.gpus
    ]
    links = [f"to {index}" for index in indices]
    return TextTable(
        heads=["GPU", "name", "memory", "PCIe now", *links, "UUID"],
        rows=rows,
        weights=[10, 5, 6, 7, *(8 - index / 100 for index in indices), 0],
    )


def link_details(machine: Machine) -> list[tuple[str, str]]:
    """Return each kind of link with its detail, once."""
    return sorted({(link.kind, link.detail) for link in machine.links if link.detail})


def _bytes(size: int | None) -> str:
    return NO_NUMBER if size is None else format_bytes(size)
