"""The agent process: starts the ranks of this node under torchelastic.

``python -m nfold.launch.agent FOLDER`` is a separate process, so that the parent never imports
torch. Without FOLDER it waits for a line of JSON on its input, with the folder and the environment,
and exits at the end of its input. The rendezvous store listens on 127.0.0.1 only; the store of
``torchrun --standalone`` listens on every interface and accepts writes from anyone.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import sys
from pathlib import Path

from nfold.core.parent_death import die_with_parent
from nfold.core.serialization import deserialize
from nfold.launch.handoff import HandoffFolder
from nfold.launch.launch_spec import RankGroup
from nfold.launch.rank_lifecycle import redirect_output
from nfold.sandbox import enter_view
from nfold.sandbox.overlay import SHARED, STATE_VARIABLE, unshare_mounts

LOOPBACK = "127.0.0.1"
TORCH_LAUNCHER = "torch.distributed.launcher.api"


def main() -> None:
    """Start the ranks, wait for them and write their exit codes."""
    die_with_parent()
    folder = HandoffFolder(Path(sys.argv[1])) if sys.argv[1:] else _wait_for_folder()
    if os.environ.get(STATE_VARIABLE) == SHARED:
        enter_view(folder.sandbox, unshared=not sys.argv[1:])
    sys.exit(launch_ranks(folder, deserialize(RankGroup, folder.read_group())))


def _wait_for_folder() -> HandoffFolder:
    if os.environ.get(STATE_VARIABLE) == SHARED:
        unshare_mounts()
    importlib.import_module(TORCH_LAUNCHER)
    line = sys.stdin.readline()
    if not line:
        sys.exit(0)
    request = json.loads(line)
    os.environ.clear()
    os.environ.update(request["environment"])
    die_with_parent()
    folder = HandoffFolder(Path(request["folder"]))
    redirect_output(folder.agent_log)
    return folder


def launch_ranks(folder: HandoffFolder, group: RankGroup) -> int:
    """Run the ranks under torchelastic; returns 0 if all succeeded, 1 or 128 + signal if not."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    _register_loopback()
    # Versions of torch without a field in LaunchConfig read this variable.
    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(group.shutdown_timeout_s)
    own_rank = {} if group.node_rank is None else {"rank": group.node_rank}
    config = LaunchConfig(
        min_nodes=group.nodes[0],
        max_nodes=group.nodes[1],
        nproc_per_node=group.processes,
        run_id=group.run_id,
        rdzv_backend=group.backend,
        rdzv_endpoint=group.endpoint,
        rdzv_configs={**group.conf, **own_rank},
        max_restarts=group.max_restarts,
        monitor_interval=group.monitor_interval_s,
    )
    if hasattr(config, "numa_options"):
        # Newer torch binds ranks to NUMA nodes, but only if N is the number of GPUs: then N = all
        # GPUs would not be comparable with fewer.
        config.numa_options = None
    program, *arguments = group.command
    try:
        elastic_launch(config, program)(*arguments)
    except ChildFailedError as error:
        folder.write_exit_codes({rank: f.exitcode for rank, f in error.failures.items()})
        return 1
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


def _register_loopback() -> None:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, not in its stub
    from torch.distributed.elastic.rendezvous import (
        RendezvousHandler,
        RendezvousInfo,
        RendezvousParameters,
        RendezvousStoreInfo,
        rendezvous_handler_registry,
    )

    class Loopback(RendezvousHandler):
        def __init__(self, parameters: RendezvousParameters) -> None:
            self._run_id = parameters.run_id
            with socket.socket() as listener:
                listener.bind((LOOPBACK, 0))
                listener.listen(128)
                self._port: int = listener.getsockname()[1]
                self._store = TCPStore(
                    LOOPBACK,
                    self._port,
                    is_master=True,
                    wait_for_workers=False,
                    master_listen_fd=os.dup(listener.fileno()),
                )
            self._closed = False

        @property
        def use_agent_store(self) -> bool:
            return True

        def get_backend(self) -> str:
            return "loopback"

        def next_rendezvous(self) -> RendezvousInfo:
            where = RendezvousStoreInfo(LOOPBACK, self._port)
            return RendezvousInfo(self._store, 0, 1, where)

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

    rendezvous_handler_registry.register("loopback", Loopback)


if __name__ == "__main__":
    main()
