"""`nfold run` on several nodes, some of them network namespaces, and where a run listens."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]
TIMEOUT_S = 4.0
BACKENDS = [pytest.param("static", marks=pytest.mark.slow), "c10d"]
DDP = """
import sys, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(int(sys.argv[1])):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    time.sleep(0.01)
    if step == 5:
        print("stepping", flush=True)
dist.destroy_process_group()
"""


class Node:
    """A folder with a script, and the commands of nfold in it, perhaps in a network namespace."""

    def __init__(self, folder: Path, namespace: str | None = None) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "train.py").write_text(DDP)
        self.folder = folder
        self._enter = [] if namespace is None else ["ip", "netns", "exec", namespace]

    def start(self, *command: str) -> None:
        self._process = subprocess.Popen(
            [*self._enter, sys.executable, "-m", "nfold", *command],
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        )

    def end(self) -> tuple[int, str]:
        _, err = self._process.communicate(timeout=120)
        return self._process.returncode, err

    def interrupt(self) -> None:
        self._process.send_signal(signal.SIGINT)
        self.end()

    def kill(self) -> None:
        if hasattr(self, "_process"):
            self._process.kill()
            self._process.communicate()

    def wait_until(self, pattern: str, text: str = "") -> None:
        """Wait until a file that matches has the text."""
        while not any(text in file.read_text() for file in self.folder.glob(pattern)):
            assert self._process.poll() is None, self.end()
            time.sleep(0.05)

    def wait_for_steps(self) -> None:
        self.wait_until("nfold-results/runs/*/rank-*.log", "stepping")

    def listening(self) -> tuple[set[str], int]:
        """Return the addresses that processes of the run listen on, and how many ranks listen."""
        found: set[str] = set()
        ranks = 0
        assert self._process.poll() is None, self.end()
        root = psutil.Process(self._process.pid)
        for process in (root, *root.children(recursive=True)):
            with contextlib.suppress(OSError, psutil.Error):
                own = _listening(Path(f"/proc/{process.pid}"))
                ranks += bool(own) and "RANK" in process.environ()
                found |= own
        return found, ranks

    @property
    def facts(self) -> dict[str, Any]:
        (file,) = self.folder.glob("nfold-results/runs/*/run.json")
        found: dict[str, Any] = json.loads(file.read_text())
        return found


def _listening(process: Path) -> set[str]:
    """Return the addresses that a process listens on; psutil reads only the own namespace."""
    sockets = {os.readlink(file) for file in (process / "fd").iterdir()}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in (process / "net" / table).read_text().splitlines()[1:]:
            _, local, _, state, *_ = fields = line.split()
            if state == "0A" and f"socket:[{fields[9]}]" in sockets:
                words = struct.iter_unpack("=I", bytes.fromhex(local.partition(":")[0]))
                address = b"".join(struct.pack(">I", word) for (word,) in words)
                found.add(str(ipaddress.ip_address(address)))
    return found


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[Node]]:
    """Two nodes of one host."""
    made = [Node(tmp_path / "a"), Node(tmp_path / "b")]
    yield made
    for node in made:
        node.kill()


def _ip(command: str) -> None:
    subprocess.run(["ip", *command.split()], check=True, capture_output=True)


@pytest.fixture
def network(tmp_path: Path) -> Iterator[tuple[list[Node], str]]:
    """Two nodes in namespaces of their own and the namespace of the router between them."""
    names = [f"nfold-{os.getpid()}-{name}" for name in ("a", "router", "b")]
    try:
        for name in names:
            _ip(f"netns add {name}")
            _ip(f"-n {name} link set lo up")
        for number, name in enumerate((names[0], names[2]), start=1):
            _ip(f"link add eth0 netns {name} type veth peer name eth{number} netns {names[1]}")
            _ip(f"-n {name} addr add 10.77.{number}.2/24 dev eth0")
            _ip(f"-n {names[1]} addr add 10.77.{number}.1/24 dev eth{number}")
            _ip(f"-n {name} link set eth0 up")
            _ip(f"-n {names[1]} link set eth{number} up")
            _ip(f"-n {name} route add default via 10.77.{number}.1")
        _forward(names[1], on=True)
    except (OSError, subprocess.CalledProcessError) as error:
        _delete(names)
        pytest.skip(f"no network namespaces here: {getattr(error, 'stderr', b'') or error}")
    made = [Node(tmp_path / "a", names[0]), Node(tmp_path / "b", names[2])]
    yield made, names[1]
    for node in made:
        node.kill()
    _delete(names)


def _forward(router: str, *, on: bool) -> None:
    _ip(f"netns exec {router} sysctl -w net.ipv4.ip_forward={int(on)}")


def _delete(names: list[str]) -> None:
    for name in names:
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _meeting(backend: str, rank: int, host: str, port: int) -> list[str]:
    if backend == "static":
        where = ["--master-addr", host, "--master-port", str(port), "--node-rank", str(rank)]
    else:
        where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{host}:{port}"]
    return ["--nnodes", "2", "--devices", "1", *where]


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


@pytest.mark.slow(parts=8)
@pytest.mark.parametrize("backend", BACKENDS)
def test_nodes_listen_on_the_address_of_the_rendezvous_only(
    network: tuple[list[Node], str], backend: str
) -> None:
    nodes, _ = network
    for rank, node in enumerate(nodes):
        node.start("run", *_meeting(backend, rank, "10.77.1.2", 29500), "train.py", "1000000")
    for node in nodes:
        node.wait_for_steps()
    assert [node.listening()[0] for node in nodes] == [{"10.77.1.2"}, {"10.77.2.2"}]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_both_nodes_end_after_a_silent_partition(
    network: tuple[list[Node], str], backend: str
) -> None:
    nodes, router = network
    limits = ("--hang-timeout", str(TIMEOUT_S))
    for rank, node in enumerate(nodes):
        where = _meeting(backend, rank, "10.77.1.2", 29500)
        node.start("run", *where, *limits, "train.py", "1000000")
    for node in nodes:
        node.wait_for_steps()
    _forward(router, on=False)
    ends = [node.end() for node in nodes]
    for (code, err), node in zip(ends, nodes, strict=True):
        assert (code, node.facts["status"]) == (1, "hung"), err
        assert "is in backward (train.py:9)" in err


@pytest.mark.slow(parts=8)
@pytest.mark.parametrize(
    ("backend", "rank", "conf", "message"),
    [
        ("static", 0, "timeout=3", "node 1 of 2 did not join in time"),
        ("static", 1, "timeout=3", "did not answer within 3 s"),
        ("c10d", 0, "join_timeout=3", "only 1 of 2 nodes joined in time: 127.0.0.1"),
    ],
)
def test_a_node_that_never_joins_is_named(
    nodes: list[Node], backend: str, rank: int, conf: str, message: str
) -> None:
    where = _meeting(backend, rank, "127.0.0.1", _free_port())
    nodes[0].start("run", *where, "--rdzv-conf", conf, "train.py", "10")
    code, err = nodes[0].end()
    assert code == 1
    assert message in err.splitlines()[0]


@pytest.mark.slow(parts=8)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_node_that_joins_late_takes_part(nodes: list[Node], backend: str) -> None:
    port = _free_port()
    limits = ("--start-timeout", "2", "--hang-timeout", "60")
    for rank, node in enumerate(nodes):
        where = _meeting(backend, rank, "127.0.0.1", port)
        node.start("run", *where, *limits, "train.py", "10")
        if rank == 0:
            node.wait_until("nfold-results/runs/*/group.json")
            time.sleep(4)  # longer than the start may take without activity
    assert [node.end()[0] for node in nodes] == [0, 0]


@pytest.mark.slow(parts=8)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_port_in_use_names_its_owner(nodes: list[Node], backend: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        where = _meeting(backend, 0, "127.0.0.1", taken.getsockname()[1])
        nodes[0].start("run", *where, "train.py", "10")
        code, err = nodes[0].end()
    assert code == 1
    assert f"used by process {os.getpid()} (" in err.splitlines()[0]


@pytest.mark.slow
def test_one_node_takes_another_port_than_one_in_use(nodes: list[Node]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        nodes[0].start("run", "--devices", "2", "--master-port", port, "train.py", "10")
        assert nodes[0].end()[0] == 0


@pytest.mark.slow(parts=8)
@pytest.mark.parametrize(
    "command",
    [
        "run --devices 2 train.py 1000000",
        pytest.param("bench digits --devices 2 --epochs 1000", marks=pytest.mark.slow),
        pytest.param("train digits --devices 2 --epochs 1000", marks=pytest.mark.slow),
        pytest.param("explain train.py --devices 2 -- 1000000", marks=pytest.mark.slow),
    ],
)
def test_one_node_listens_on_the_loopback_only(nodes: list[Node], command: str) -> None:
    node = nodes[0]
    node.start(*command.split())
    listening, ranks = node.listening()
    while ranks < 2:  # they open their ports after the store
        time.sleep(0.05)
        addresses, ranks = node.listening()
        listening |= addresses
    assert listening <= {"127.0.0.1", "::1"}
    node.interrupt()
