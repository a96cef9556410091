"""The options of ``nfold run``, which are torchrun's, and the ranks and rendezvous they define."""

from __future__ import annotations

import importlib.util
import ipaddress
import os
import shutil
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import psutil

from nfold.core.errors import DevicesMissing, UnknownValue, UsageError
from nfold.core.machine import Machine
from nfold.core.plan import PLAN_FIELDS, SAFE_PLAN, Plan, parse_device_count
from nfold.launch.launch_spec import LOOPBACK_ENVIRONMENT, check_positive_seconds

STATIC_PORT = 29500  # torchrun's default of --master-port
RENDEZVOUS_BACKENDS = ("c10d", "static", "etcd", "etcd-v2")


@dataclass(frozen=True, kw_only=True)
class TorchrunArgs:
    """The options of ``nfold run``; None if not given. Times are in seconds.

    ``settings`` is the file of ``--with``.
    """

    script: str
    arguments: tuple[str, ...] = ()
    module: bool = False
    no_python: bool = False
    nproc_per_node: str | None = None
    nnodes: str = "1"
    node_rank: int | None = None
    rdzv_backend: str | None = None
    rdzv_endpoint: str | None = None
    rdzv_id: str | None = None
    rdzv_conf: str | None = None
    master_addr: str | None = None
    master_port: int | None = None
    standalone: bool = False
    max_restarts: int = 0
    monitor_interval: float = 0.1
    local_ranks_filter: str | None = None
    plan: tuple[str, ...] = ()
    watch: bool = False
    settings: Path | None = None
    force: bool = False
    results: Path = Path("nfold-results")
    hang_timeout: float = 60.0
    start_timeout: float = 300.0

    def __post_init__(self) -> None:
        check_positive_seconds(
            hang_timeout=self.hang_timeout,
            start_timeout=self.start_timeout,
            monitor_interval=self.monitor_interval,
        )

    @property
    def kind(self) -> str:
        """``script``, ``module`` or ``program``."""
        if self.module and self.no_python:
            raise UsageError("--module and --no-python: allowed is one of them; next: remove one")
        for option, given in (("--watch", self.watch), ("--with", self.settings is not None)):
            if given and self.no_python:
                raise UsageError(f"{option} needs a Python script; next: remove --no-python")
        return "module" if self.module else "program" if self.no_python else "script"


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """How the nodes of a run meet, with the terms of torchelastic; one node uses the loopback."""

    nodes: tuple[int, int] = (1, 1)
    backend: str = "loopback"
    endpoint: str = ""
    run_id: str = "nfold"
    conf: dict[str, str]
    node_rank: int | None = None

    @property
    def warning(self) -> str | None:
        """A warning if the rendezvous has a public address, else None."""
        host = split_endpoint(self.endpoint)[0]
        if not host or not ipaddress.ip_address(resolve(host)).is_global:
            return None
        return (
            f"the rendezvous {host} is a public address and accepts commands from anyone; next: "
            "use a private network"
        )

    @property
    def environment(self) -> dict[str, str]:
        """The network interface of the ranks: the loopback on one node, else that of the rendezvous.

        NCCL chooses its own interfaces on several nodes: it can use all of them.
        """
        if self.nodes[1] == 1:
            return LOOPBACK_ENVIRONMENT
        address = own_address(self.endpoint)
        names = (
            name
            for name, entries in psutil.net_if_addrs().items()
            if any(entry.address == address for entry in entries)
        )
        interface = os.environ.get("GLOO_SOCKET_IFNAME") or next(names, None)
        return {"GLOO_SOCKET_IFNAME": interface} if interface else {}


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT``, ``HOST`` or ``[IPV6]:PORT``; STATIC_PORT by default."""
    host, colon, port = endpoint.rpartition(":")
    if not colon or not port.isdecimal():
        return endpoint.strip("[]"), STATIC_PORT
    return host.strip("[]"), int(port)


def resolve(host: str) -> str:
    """Return the IP address of a host; "0.0.0.0" if its name cannot be resolved."""
    try:
        address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]
    except OSError:
        return "0.0.0.0"  # noqa: S104  # not to bind a socket
    return str(address)


def is_loopback(address: str) -> bool:
    return bool(address) and ipaddress.ip_address(address).is_loopback


def own_address(endpoint: str) -> str | None:
    """Return the address of this machine on the way to the endpoint; None if there is no way."""
    host, port = split_endpoint(endpoint)
    address = resolve(host)
    with socket.socket(
        socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM
    ) as probe:
        try:
            probe.connect((address, port))  # sends nothing
        except OSError:
            return None
        return str(probe.getsockname()[0])


def check_target(args: TorchrunArgs) -> None:
    """Raise UsageError if the script does not exist."""
    name = args.script
    if args.kind == "module":
        top = name.partition(".")[0]
        path = [os.getcwd(), *sys.path]
        exists = bool(PathFinder.find_spec(top, path) or importlib.util.find_spec(top))
        target, places = f"module {name!r}", f"{os.getcwd()} and Python's path"
    elif args.kind == "program":
        exists = shutil.which(name) is not None
        target, places = f"program {name!r}", "the folders of PATH"
    else:
        exists = os.path.exists(name)
        target, places = f"script {name!r}", os.path.abspath(name)
    if not exists:
        raise UsageError(
            f"{target} does not exist, looked for in {places}; allowed are the path of a Python "
            "script, -m MODULE, --no-python PROGRAM; next: check the name and the folder"
        )


def parse_plan_fields(pairs: Sequence[str]) -> dict[str, Any]:
    """Return the plan fields that ``NAME=VALUE`` pairs set, checked.

    ``safe`` alone leaves no field to a search; it becomes ``{"safe": True}``.
    """
    fields: dict[str, Any] = {}
    for pair in pairs:
        if pair == SAFE_PLAN:
            continue
        name, equals, value = pair.partition("=")
        if not equals:
            raise UsageError(
                f"--plan {pair}: allowed are NAME=VALUE and safe; next: --plan precision=bf16"
            )
        if name not in PLAN_FIELDS:
            raise UnknownValue("plan field", name, PLAN_FIELDS)
        fields[name] = int(value) if value.isdecimal() else value
    Plan(**fields)
    return {**fields, SAFE_PLAN: True} if SAFE_PLAN in pairs else fields


def parse_devices(nproc: str | None, fields: dict[str, Any]) -> tuple[str | None, str | None]:
    """Return the device type, or None, and the count of ``--nproc-per-node``.

    The count is a number, or ``gpu``, ``cpu`` or ``auto``.
    """
    kind, count = "cpu" if nproc == "cpu" else None, nproc
    if nproc not in (None, "auto", "cpu", "gpu"):
        kind, number = parse_device_count(nproc)
        count = str(number)
    named: str | None = fields.get("device")
    if kind and named not in (None, kind):
        raise UsageError(
            f"--nproc-per-node {nproc} conflicts with --plan device={named}: allowed is "
            "one device type; next: remove --plan device"
        )
    return kind or named, count


def count_processes(nproc: str | None, device: str, machine: Machine) -> int:
    """Return the number of ranks of this node; default: all GPUs, or 1 CPU device."""
    gpus = len(machine.gpus)
    if nproc in ("auto", "cpu"):
        return gpus if device == "cuda" else machine.cores
    if nproc is None and device == "cpu":
        return 1
    wanted = gpus if nproc in (None, "gpu") else int(nproc)
    if (device == "cuda" and wanted > gpus) or wanted < 1 or (nproc == "gpu" and device == "cpu"):
        raise DevicesMissing(
            f"{wanted or 'all'} GPUs requested, {gpus} exist here; next: "
            + (f"--nproc-per-node {gpus}, or " if gpus else "")
            + "--nproc-per-node cpu, or --plan device=cpu"
        )
    return wanted


def parse_shown_ranks(text: str | None, processes: int) -> tuple[int, ...]:
    """Return the local ranks whose output is shown; default: the first."""
    if not text:
        return (0,)
    parts = [part.strip() for part in text.split(",")]
    wrong = [part for part in parts if not part.isdecimal() or int(part) >= processes]
    if wrong:
        raise UsageError(
            f"--local-ranks-filter {wrong[0]}: allowed are the local ranks 0 to {processes - 1}"
        )
    return tuple(sorted({int(part) for part in parts}))


def build_rendezvous(args: TorchrunArgs) -> Rendezvous:
    """Return the loopback on one node, else a backend of torchelastic: static if a master is named."""
    nodes, conf = _nodes(args.nnodes), _conf(args.rdzv_conf)
    if args.standalone and nodes[1] > 1:
        raise UsageError(
            f"--standalone with --nnodes {args.nnodes}: allowed is one node; next: remove one option"
        )
    if args.standalone or (nodes[1] == 1 and not args.rdzv_endpoint):
        return Rendezvous(conf={})
    named = args.master_addr is not None or args.node_rank is not None
    static = named and not args.rdzv_endpoint
    backend = args.rdzv_backend or ("static" if static else "c10d")
    if backend not in RENDEZVOUS_BACKENDS:
        raise UnknownValue("--rdzv-backend", backend, RENDEZVOUS_BACKENDS)
    return Rendezvous(
        nodes=nodes,
        backend=backend,
        endpoint=_endpoint(args, backend),
        run_id=args.rdzv_id or "none",
        conf=conf,
        node_rank=(args.node_rank or 0) if backend == "static" else None,
    )


def _endpoint(args: TorchrunArgs, backend: str) -> str:
    if args.rdzv_endpoint:
        return args.rdzv_endpoint
    if backend == "static" and args.master_addr:
        return f"{args.master_addr}:{args.master_port or STATIC_PORT}"
    raise UsageError(
        f"--nnodes {args.nnodes} needs a rendezvous; next: --rdzv-endpoint HOST:PORT on "
        "every node, or --master-addr HOST --node-rank K"
    )


def _nodes(text: str) -> tuple[int, int]:
    fewest, _, most = text.partition(":")
    most = most or fewest
    if not (fewest.isdecimal() and most.isdecimal() and 0 < int(fewest) <= int(most)):
        raise UsageError(f"--nnodes {text}: allowed are N or MIN:MAX, whole numbers from 1")
    return int(fewest), int(most)


def _conf(text: str | None) -> dict[str, str]:
    pairs = [pair.partition("=") for pair in (text or "").split(",") if pair.strip()]
    for name, _, value in pairs:
        if not name.strip() or not value.strip():
            raise UsageError(f"--rdzv-conf {text}: allowed is NAME=VALUE,NAME=VALUE")
    return {name.strip(): value.strip() for name, _, value in pairs}
