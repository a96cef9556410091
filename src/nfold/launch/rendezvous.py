"""How agents meet: backends of torchelastic whose stores listen on one address only.

The rendezvous store listens on the address of the rendezvous, on one node 127.0.0.1; the stores of
torchrun listen on every interface and accept writes from anyone.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from datetime import timedelta
from typing import Any

import psutil
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

from nfold.launch.launch_spec import AGENT_MODULE
from nfold.launch.torchrun_args import is_loopback, own_address, resolve, split_endpoint

LOOPBACK = "127.0.0.1"
JOIN_TIMEOUT_S = 600  # torch's
JOIN_POLL_S = 0.2
OWN_BACKEND = "nfold-tcp"  # of the loopback and of a static rendezvous


def register_backends() -> None:
    """Register nfold's backend with torchelastic, and let c10d listen on one address only."""
    rendezvous_handler_registry.register(OWN_BACKEND, TcpRendezvous)
    c10d_rendezvous_backend.TCPStore = open_store  # type: ignore[attr-defined, assignment]
    c10d_rendezvous_backend._matches_machine_hostname = is_own_host  # type: ignore[attr-defined]
    dynamic_rendezvous.DynamicRendezvousHandler = DynamicRendezvous  # type: ignore[misc]


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
