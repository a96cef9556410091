"""What `nfold run` makes of its flags, and how it tells what became of a script."""

from __future__ import annotations

import io
import json
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from made import machine
from nfold.core.errors import DevicesMissing, UnknownValue, UsageError
from nfold.core.measurement import FailureCause
from nfold.launch import script_run
from nfold.launch.handoff import HandoffFolder, RankFailure
from nfold.launch.script_run import (
    LocalRanks,
    LogFollower,
    describe_outcome,
    exit_code,
)
from nfold.launch.supervisor import TreeExit
from nfold.launch.torchrun_args import (
    TorchrunArgs,
    build_rendezvous,
    check_target,
    parse_plan_fields,
)
from nfold.launch.verdict import Outcome


def asked(**options: Any) -> TorchrunArgs:
    return TorchrunArgs(script="train.py", **options)


@pytest.mark.parametrize(
    ("nproc", "gpus", "processes", "device", "cores"),
    [
        (None, 0, 1, "cpu", 4),
        (None, 3, 3, "cuda", 0),
        ("2", 0, 2, "cpu", 2),
        ("3", 0, 3, "cpu", 1),
        ("9", 0, 9, "cpu", 0),
        ("2", 3, 2, "cuda", 0),
        ("gpu", 3, 3, "cuda", 0),
        ("auto", 3, 3, "cuda", 0),
        ("auto", 0, 4, "cpu", 1),
        ("cpu", 3, 4, "cpu", 1),
        ("cpu:2", 3, 2, "cpu", 2),
        ("cuda:2", 3, 2, "cuda", 0),
    ],
)
def test_ranks_and_their_devices(
    nproc: str | None, gpus: int, processes: int, device: str, cores: int
) -> None:
    ranks = LocalRanks.from_args(asked(nproc_per_node=nproc), machine(gpus=gpus, cores=4))
    assert (ranks.processes, ranks.device, ranks.cores_per_rank) == (processes, device, cores)


def test_cpu_devices_on_a_machine_with_gpus() -> None:
    ranks = LocalRanks.from_args(
        asked(nproc_per_node="2", plan=("device=cpu",)), machine(gpus=3, cores=4)
    )
    assert (ranks.device, ranks.plan) == ("cpu", {"device": "cpu"})
    for named in ("cpu", "cpu:2"):
        assert LocalRanks.from_args(asked(nproc_per_node=named), machine(gpus=3)).plan == {
            "device": "cpu"
        }


@pytest.mark.parametrize(("nproc", "gpus"), [("4", 3), ("gpu", 0), ("cuda:2", 0)])
def test_more_gpus_than_there_are(nproc: str, gpus: int) -> None:
    with pytest.raises(DevicesMissing, match=f"{gpus} exist here; next: "):
        LocalRanks.from_args(asked(nproc_per_node=nproc), machine(gpus=gpus))


@pytest.mark.parametrize(
    "options",
    [
        {"nproc_per_node": "two"},
        {"nproc_per_node": "0"},
        {"nproc_per_node": "cpu:0"},
        {"nproc_per_node": "tpu:2"},
        {"nproc_per_node": "cpu:2", "plan": ("device=cuda",)},
        {"local_ranks_filter": "0,2", "nproc_per_node": "2"},
        {"local_ranks_filter": "x"},
        {"plan": ("precision",)},
    ],
)
def test_what_cannot_be_understood(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="allowed"):
        LocalRanks.from_args(asked(**options), machine())


def test_run_facts_hold_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/alice")
    args = TorchrunArgs(
        script="/home/alice/train.py",
        arguments=("--wandb-key=s3cret", "--api-token", "s3cret"),
        rdzv_conf="timeout=3,token=s3cret",
        results=Path("/home/alice/results"),
    )
    facts = json.dumps(script_run._serialize_args(args))
    assert "s3cret" not in facts
    assert "alice" not in facts
    assert json.loads(facts)["rdzv_conf"] == "timeout=3,token=***"


def test_plan_fields_are_checked() -> None:
    assert parse_plan_fields(["precision=bf16", "seed=3"]) == {"precision": "bf16", "seed": 3}
    assert parse_plan_fields(["safe", "seed=3"]) == {"safe": True, "seed": 3}
    with pytest.raises(UsageError, match="--plan fast: allowed are NAME=VALUE and safe"):
        parse_plan_fields(["fast"])
    with pytest.raises(UnknownValue, match="precision"):
        parse_plan_fields(["precison=bf16"])
    with pytest.raises(UnknownValue, match="bf16"):
        parse_plan_fields(["precision=bf17"])
    with pytest.raises(UsageError, match="whole numbers"):
        parse_plan_fields(["seed=x"])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"standalone": True, "rdzv_endpoint": "host:1"},
        {"master_addr": "127.0.0.1", "master_port": 5},
        {"rdzv_backend": "c10d"},
    ],
)
def test_one_node_meets_on_the_loopback(options: dict[str, Any]) -> None:
    meeting = build_rendezvous(asked(**options))
    assert (meeting.backend, meeting.endpoint, meeting.nodes) == ("loopback", "", (1, 1))


def test_several_nodes_meet_as_torchelastic_does() -> None:
    endpoint = {"rdzv_endpoint": "host:29400", "rdzv_id": "job", "rdzv_conf": "timeout=5, a=b"}
    meeting = build_rendezvous(asked(nnodes="1:4", **endpoint))
    assert (meeting.backend, meeting.endpoint) == ("c10d", "host:29400")
    assert (meeting.nodes, meeting.run_id) == ((1, 4), "job")
    assert meeting.conf == {"timeout": "5", "a": "b"}
    assert meeting.node_rank is None


def test_a_named_master_is_a_static_rendezvous() -> None:
    meeting = build_rendezvous(asked(nnodes="2", master_addr="node0", node_rank=1))
    assert (meeting.backend, meeting.endpoint) == ("static", "node0:29500")
    assert meeting.node_rank == 1


@pytest.mark.parametrize(
    "options",
    [
        {"nnodes": "2"},
        {"nnodes": "0"},
        {"nnodes": "3:2"},
        {"nnodes": "2", "standalone": True},
        {"nnodes": "2", "rdzv_endpoint": "h:1", "rdzv_backend": "mpi"},
        {"nnodes": "2", "rdzv_endpoint": "h:1", "rdzv_conf": "timeout"},
    ],
)
def test_nodes_that_cannot_meet(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        build_rendezvous(asked(**options))


@pytest.mark.parametrize(
    ("endpoint", "warns"),
    [
        ("8.8.8.8:29400", True),
        ("[2606:4700::1111]:29400", True),
        ("public:29400", True),
        ("10.0.0.1:29400", False),
        ("node0:29400", False),
    ],
)
def test_a_public_place_to_meet_is_warned_of(
    endpoint: str, warns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses = {"public": "8.8.4.4", "node0": "192.168.0.7"}
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda host, *_, **__: [(0, 0, 0, "", (addresses.get(host, host), 0))],
    )
    meeting = build_rendezvous(asked(nnodes="2", rdzv_endpoint=endpoint))
    assert (meeting.warning is not None) == warns


@pytest.mark.parametrize("options", [{}, {"module": True}, {"no_python": True}])
def test_a_script_that_is_not_there(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"looked for in .*next: "):
        check_target(TorchrunArgs(script="nowhere_at_all", **options))
    with pytest.raises(UsageError, match="one of them"):
        check_target(asked(module=True, no_python=True))


def test_scripts_that_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here.py").touch()
    check_target(TorchrunArgs(script="here.py"))
    check_target(TorchrunArgs(script="here", module=True))
    check_target(TorchrunArgs(script="json.tool", module=True))
    check_target(TorchrunArgs(script="sh", no_python=True))


def outcome(path: Path, ending: TreeExit, *failures: RankFailure, **exits: int) -> Outcome:
    path.mkdir(exist_ok=True)
    folder = HandoffFolder(path)
    for failure in failures:
        folder.reports.write_failure(failure)
    folder.agent.write_exit_codes({int(rank[1:]): code for rank, code in exits.items()})
    return script_run._outcome(folder, ending)


def failure(rank: int, at: int, *, collateral: bool = False) -> RankFailure:
    text = f"ValueError: {rank} (train.py:{at})"
    return RankFailure(
        rank=rank, status="crashed", text=text, monotonic_ns=at, collateral=collateral
    )


def test_the_root_cause_comes_first(tmp_path: Path) -> None:
    ended = outcome(
        tmp_path, TreeExit(exit_code=1), failure(0, 1, collateral=True), failure(1, 2), r2=-9, r1=1
    )
    lines = describe_outcome(ended).splitlines()
    assert lines[0] == "rank 1 failed first: ValueError: 1 (train.py:2)"
    assert lines[1] == "  rank 0: ValueError: 0 (train.py:1) (collateral)"
    assert lines[2] == "  rank 2: ended by SIGKILL"
    assert lines[3].startswith("  logs: ")
    assert "rank-1.log first" in lines[3]
    assert exit_code(ended) == 1


def test_a_killed_rank_is_told_with_its_signal(tmp_path: Path) -> None:
    ended = outcome(tmp_path, TreeExit(exit_code=1), failure(0, 1, collateral=True), r0=-15, r1=-9)
    lines = describe_outcome(ended).splitlines()
    assert lines[0].startswith("rank 1 was ended by SIGKILL")
    assert lines[1].endswith("(collateral)")


def test_an_agent_that_failed_says_its_last_line(tmp_path: Path) -> None:
    HandoffFolder(tmp_path).agent_log.write_text("much\nRendezvousTimeoutError: nobody came\n")
    ended = outcome(tmp_path, TreeExit(exit_code=1))
    assert "RendezvousTimeoutError: nobody came" in describe_outcome(ended).splitlines()[0]
    assert "agent.log first" in describe_outcome(ended)


def test_a_good_end_after_a_restart_is_a_good_end(tmp_path: Path) -> None:
    ended = outcome(tmp_path, TreeExit(exit_code=0), failure(0, 1), r0=1)
    assert (ended.status, ended.cause, exit_code(ended)) == ("ok", None, 0)


def test_a_request_to_stop_is_its_own_exit_code(tmp_path: Path) -> None:
    ended = outcome(tmp_path, TreeExit(stop_signal=signal.SIGHUP), failure(0, 1))
    assert exit_code(ended) == 129


def test_a_hang_says_where_the_stacks_are(tmp_path: Path) -> None:
    ended = outcome(tmp_path, TreeExit(hung=(1, 7), seconds_since_step=61.0))
    text = "rank 1 made no progress after step 7"
    assert ended.cause == FailureCause(text=text, rank=1, step=7, stalled_s=61.0)
    assert describe_outcome(ended).startswith("hung: rank 1")
    assert "stack-K.txt" in describe_outcome(ended)


def test_one_shown_rank_is_copied_as_it_is(tmp_path: Path) -> None:
    output = io.BytesIO()
    follower = LogFollower(HandoffFolder(tmp_path), [1], output)
    follower.copy()
    with HandoffFolder(tmp_path).rank_log(1).open("ab", buffering=0) as log:
        for text in (b"a", b"b\r", b"\x1b[2K\xff\n"):
            log.write(text)
            follower.copy()
    assert output.getvalue() == b"ab\r\x1b[2K\xff\n"


def test_of_several_ranks_whole_lines_are_copied(tmp_path: Path) -> None:
    output = io.BytesIO()
    folder = HandoffFolder(tmp_path)
    follower = LogFollower(folder, [0, 1], output)
    folder.rank_log(0).write_bytes(b"one\ntw")
    folder.rank_log(1).write_bytes(b"other\n")
    follower.copy()
    assert output.getvalue() == b"[rank 0] one\n[rank 1] other\n"
    with folder.rank_log(0).open("ab") as log:
        log.write(b"o")
    follower.finish()
    assert output.getvalue().endswith(b"[rank 1] other\n[rank 0] two\n")


def test_ranks_of_a_later_node_are_shown_by_their_local_rank(tmp_path: Path) -> None:
    folder, output = HandoffFolder(tmp_path), io.BytesIO()
    folder.rank_log(6).write_bytes(b"six\n")
    folder.reset_rank(6, 2)
    LogFollower(folder, [2, 3], output).finish()
    assert output.getvalue() == b"[rank 6] six\n"


def test_threads_that_the_user_chose_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = LocalRanks.from_args(asked(nproc_per_node="2", plan=("seed=3",)), machine(cores=8))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    one_node = build_rendezvous(asked())
    own = script_run._environment(HandoffFolder(tmp_path), ranks, one_node, watch=False)
    assert own["GLOO_SOCKET_IFNAME"] == "lo"
    assert own["OMP_NUM_THREADS"] == "4"
    assert own["NFOLD_FOLDER"] == str(tmp_path)
    assert json.loads(own["NFOLD_PLAN"]) == {"seed": 3}
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    several = build_rendezvous(asked(nnodes="2", rdzv_endpoint="127.0.0.2:29400"))
    kept = script_run._environment(HandoffFolder(tmp_path), ranks, several, watch=True)
    assert "OMP_NUM_THREADS" not in kept
    assert ("NFOLD_WATCH" in own, kept["NFOLD_WATCH"]) == (False, "1")
    assert "NCCL_SOCKET_IFNAME" not in kept
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert several.environment == {"GLOO_SOCKET_IFNAME": "eth7"}
