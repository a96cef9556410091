"""The agent process: starts the ranks of this node under torchelastic.

``python -m nfold.launch.agent FOLDER`` is a separate process, so that the parent never imports
torch. Without FOLDER it imports the modules of a first line of JSON on its input, waits for a second
one, a WarmRequest, and exits at the end of its input. The rendezvous store listens on the address of
the rendezvous only, on one node 127.0.0.1; the stores of torchrun listen on every interface and
accept writes from anyone.
"""

from __future__ import annotations

import errno
import importlib
import json
import os
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil

from nfold.core.fingerprint import imports_are_equal
from nfold.core.parent_death import die_with_parent
from nfold.core.serialization import deserialize
from nfold.launch import warm_process
from nfold.launch.handoff import HandoffFolder
from nfold.launch.launch_spec import AGENT_MODULE, RankGroup, WarmRequest
from nfold.launch.rank_lifecycle import redirect_output
from nfold.launch.torchrun_args import is_loopback, own_address, resolve, split_endpoint
from nfold.sandbox import enter_view
from nfold.sandbox.overlay import PER_RANK, SHARED, STATE_VARIABLE, unshare_mounts

LOOPBACK = "127.0.0.1"
JOIN_TIMEOUT_S = 600  # torch's
JOIN_POLL_S = 0.2
OWN_BACKEND = "nfold-tcp"  # of the loopback and of a static rendezvous
TORCH_LAUNCHER = "torch.distributed.launcher.api"


def main() -> None:
    """Start the ranks, wait for them and write their exit codes."""
    die_with_parent()
    folder = HandoffFolder(Path(sys.argv[1])) if sys.argv[1:] else _wait_for_folder()
    if os.environ.get(STATE_VARIABLE) == SHARED:
        enter_view(folder.sandbox, unshared=not sys.argv[1:])
    sys.exit(launch_ranks(folder, deserialize(RankGroup, folder.agent.read_group())))


def _wait_for_folder() -> HandoffFolder:
    """Wait for a run with several ranks, or become its only rank."""
    if os.environ.get(STATE_VARIABLE) == SHARED:
        unshare_mounts()
    libraries = json.loads(sys.stdin.readline() or "[]")
    started = dict(os.environ)
    os.environ.setdefault(warm_process.NVML_CHECK, "1")
    importlib.import_module(TORCH_LAUNCHER)
    warm_process.import_libraries(libraries)
    line = sys.stdin.readline()
    if not line:
        sys.exit(0)
    request = deserialize(WarmRequest, json.loads(line))
    warm_process.import_libraries(request.libraries)
    os.environ.clear()
    os.environ.update(request.environment)
    die_with_parent()
    folder = HandoffFolder(Path(request.folder))
    redirect_output(folder.agent_log)
    is_warm = imports_are_equal(started, os.environ) and warm_process.may_fork()
    if request.rank_command:
        if not is_warm or os.environ.get(STATE_VARIABLE) == PER_RANK:
            os.execve(request.rank_command[0], request.rank_command, os.environ)  # noqa: S606
        if os.environ.get(STATE_VARIABLE) == SHARED:
            enter_view(folder.sandbox, unshared=True)
        warm_process.become_rank(request.rank_command)
    if is_warm:
        fork_ranks()
    return folder


def fork_ranks() -> None:
    """Let torchelastic fork the ranks of a workload in this process; other programs start as before.

    torchelastic then asks for GPUs without starting one.
    """
    unasked = warm_process.NVML_CHECK not in os.environ
    os.environ.setdefault(warm_process.NVML_CHECK, "1")
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    start_program = SubprocessHandler._popen

    def start(handler: Any, args: tuple[str, ...], env: dict[str, str]) -> Any:
        if unasked:
            env.pop(warm_process.NVML_CHECK, None)
        return (
            warm_process.ForkedRank(args, env)
            if warm_process.is_rank(args)
            else start_program(handler, args, env)
        )

    SubprocessHandler._popen = start  # type: ignore[assignment, method-assign]


def launch_ranks(folder: HandoffFolder, group: RankGroup) -> int:
    """Run the ranks under torchelastic; returns 0 if all succeeded, 1 or 128 + signal if not."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    register_backends()
    # Versions of torch without a field in LaunchConfig read this variable.
    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(group.shutdown_timeout_s)
    own_rank = {} if group.node_rank is None else {"rank": group.node_rank}
    config = LaunchConfig(
        min_nodes=group.nodes[0],
        max_nodes=group.nodes[1],
        nproc_per_node=group.processes,
        run_id=group.run_id,
        rdzv_backend=OWN_BACKEND if group.backend in ("loopback", "static") else group.backend,
        rdzv_endpoint=group.endpoint,
        rdzv_configs={**group.conf, **own_rank},
        max_restarts=group.max_restarts,
        monitor_interval=group.monitor_interval_s,
        local_addr=own_address(group.endpoint) if group.endpoint else None,
    )
    if hasattr(config, "numa_options"):
        # Newer torch binds ranks to NUMA nodes, but only if N is the number of GPUs: then N = all
        # GPUs would not be comparable with fewer.
        config.numa_options = None
    program, *arguments = group.command
    try:
        elastic_launch(config, program)(*arguments)
    except ChildFailedError as error:
        folder.agent.write_exit_codes({rank: f.exitcode for rank, f in error.failures.items()})
        return 1
    except SignalException as error:
        return 128 + int(error.sigval)
    except RendezvousError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


def register_backends() -> None:
    """Register nfold's backend with torchelastic, and let c10d listen on one address only."""
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # not in its stub
    from torch.distributed.elastic.rendezvous import (
        RendezvousConnectionError,
        RendezvousHandler,
        RendezvousInfo,
        RendezvousParameters,
        RendezvousStoreInfo,
        RendezvousTimeoutError,
        c10d_rendezvous_backend,
        dynamic_rendezvous,
        rendezvous_handler_registry,
    )

    def serve(host: str, port: int, **options: Any) -> Any:
        """Return a store whose server listens on the address of ``host`` only."""
        with listen(host, port) as listener:
            return TCPStore(
                host,
                listener.getsockname()[1],
                is_master=True,
                wait_for_workers=False,
                master_listen_fd=os.dup(listener.fileno()),
                **options,
            )

    class TcpRendezvous(RendezvousHandler):
        """Meets on a store of node 0; the number of nodes and their ranks are fixed."""

        def __init__(self, parameters: RendezvousParameters) -> None:
            self._run_id = parameters.run_id
            self._nodes = parameters.max_nodes
            self._node_rank = int(parameters.get("rank", 0))
            host, port = split_endpoint(parameters.endpoint or f"{LOOPBACK}:0")
            seconds = float(parameters.get("timeout", JOIN_TIMEOUT_S))
            self._deadline = time.monotonic() + seconds
            try:
                if self._node_rank == 0:
                    self._store = serve(host, port, timeout=timedelta(seconds=seconds))
                else:
                    self._store = TCPStore(host, port, timeout=timedelta(seconds=seconds))
            except (OSError, RuntimeError) as error:
                server = f"node 0 ({host}:{port})"
                reason = f"{server} did not answer within {seconds:.0f} s"
                if self._node_rank == 0:
                    owner = find_port_owner(port)
                    reason = f"{server}: {error if owner is None else f'is used by {owner}'}"
                raise RendezvousConnectionError(
                    f"{reason}; next: check --master-addr and --master-port on every node"
                ) from error
            self._info = RendezvousStoreInfo(host, self._store.port)
            self._closed = False

        @property
        def use_agent_store(self) -> bool:
            return True

        def get_backend(self) -> str:
            return OWN_BACKEND

        def next_rendezvous(self) -> RendezvousInfo:
            store = PrefixStore(self._run_id, self._store)
            store.set(f"node/{self._node_rank}", socket.gethostname())
            missing = [rank for rank in range(self._nodes) if not store.check([f"node/{rank}"])]
            while missing and time.monotonic() < self._deadline:
                time.sleep(JOIN_POLL_S)
                missing = [rank for rank in missing if not store.check([f"node/{rank}"])]
            if missing:
                ranks = ", ".join(map(str, missing))
                raise RendezvousTimeoutError(
                    f"node {ranks} of {self._nodes} did not join in time; next: start nfold run there "
                    f"with --node-rank {missing[0]}, or more time: --rdzv-conf timeout=SECONDS"
                )
            return RendezvousInfo(store, self._node_rank, self._nodes, self._info)

        def is_closed(self) -> bool:
            return self._closed

        def set_closed(self) -> None:
            self._closed = True

        def num_nodes_waiting(self) -> int:
            return 0

        def get_run_id(self) -> str:
            return self._run_id

        def shutdown(self) -> bool:
            self._closed = True
            return True

    def open_store(host: str, port: int, is_master: bool = False, **options: Any) -> Any:
        options.pop("multi_tenant", None)
        try:
            return serve(host, port, **options) if is_master else TCPStore(host, port, **options)
        except OSError as error:
            owner = find_port_owner(port)
            if owner is not None and AGENT_MODULE not in owner:
                raise RendezvousConnectionError(
                    f"{host}:{port} is used by {owner}; next: another port in --rdzv-endpoint"
                ) from error
            # Another node of this host has the store: torch then connects to it.
            raise RuntimeError(str(error)) from error

    class DynamicRendezvous(dynamic_rendezvous.DynamicRendezvousHandler):
        def _create_tcp_store_server(self, host: str, port: int) -> Any:
            return serve(host, port)

        def next_rendezvous(self) -> RendezvousInfo:
            try:
                return super().next_rendezvous()
            except RendezvousTimeoutError:
                state = self._state_holder.state
                joined = sorted({node.addr for node in (*state.participants, self._this_node)})
                raise RendezvousTimeoutError(
                    f"only {len(joined)} of {self._settings.min_nodes} nodes joined in time: "
                    f"{', '.join(joined)}; next: start nfold run on the missing nodes, or more time: "
                    "--rdzv-conf join_timeout=SECONDS"
                ) from None

    rendezvous_handler_registry.register(OWN_BACKEND, TcpRendezvous)
    c10d_rendezvous_backend.TCPStore = open_store  # type: ignore[attr-defined, assignment]
    c10d_rendezvous_backend._matches_machine_hostname = is_own_host  # type: ignore[attr-defined]
    dynamic_rendezvous.DynamicRendezvousHandler = DynamicRendezvous  # type: ignore[misc]


def is_own_host(host: str) -> bool:
    """Return whether the host is this machine; unlike torchelastic asks no name server for its addresses."""
    return resolve(host) == own_address(f"[{host}]:1")


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on the address of ``host``.

    It listens on all addresses if the name of this machine resolves to a loopback address, which
    other nodes cannot reach, or if the address belongs to a router of this machine (NAT).
    """
    address = resolve(host)
    if is_loopback(address) and host not in (address, "localhost"):
        address = ""
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, port))
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            listener.close()
            raise
        listener.bind(("", port))
    listener.listen(128)
    return listener


def find_port_owner(port: int) -> str | None:
    """Return the id and the command of a process of this machine that listens on the port."""
    try:
        listening = [c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
        pid = next(
            c.pid for c in listening if c.laddr and c.laddr.port == port and c.pid is not None
        )
        return f"process {pid} ({' '.join(psutil.Process(pid).cmdline())[:100]})"
    except (StopIteration, psutil.Error):
        return None


if __name__ == "__main__":
    main()
