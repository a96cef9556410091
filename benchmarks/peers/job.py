"""What every arm is asked for, by its command line and its environment; imports no framework."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn, cast

from turns import Channel, Stop

from nfold import data, workloads
from nfold.core.child_process import die_with_parent
from nfold.core.workload import Workload
from nfold.data import photographs
from nfold.data.arrays import DataSetArrays
from nfold.data.packed_jpegs import PackedJpegs
from nfold.workloads.workload_info import WorkloadInfo


@dataclass(frozen=True, kw_only=True)
class Job:
    """One rank's part of one arm.

    ``batch`` counts the samples of a step over all of the arm's devices, ``devices`` those that
    this process drives. ``fields`` are the arm's own options (of nfold: fields of its plan).
    """

    workload: Workload
    batch: int
    device: str
    devices: int = 1
    warmup: int = 30
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    fields: dict[str, str] = field(default_factory=dict)
    channel: Channel

    @property
    def info(self) -> WorkloadInfo:
        """The workload as the catalogue knows it."""
        return workloads.info(self.workload.name)

    @property
    def parameters(self) -> dict[str, int]:
        """All of the workload's parameters."""
        return workloads.parameters(self.workload)

    @property
    def share(self) -> int:
        """Samples of this rank in a step; raises ValueError where ranks would differ."""
        if self.batch % self.world_size:
            raise ValueError(f"a batch of {self.batch} does not divide over {self.world_size}")
        return self.batch // self.world_size

    def numbers(self, **defaults: int) -> dict[str, int]:
        """The arm's options, all whole numbers; raises ValueError for one that it has not."""
        unknown = sorted(set(self.fields) - set(defaults))
        if unknown:
            raise ValueError(f"unknown field {unknown[0]!r}; allowed are {', '.join(defaults)}")
        return {**defaults, **{name: int(value) for name, value in self.fields.items()}}

    def arrays(self) -> DataSetArrays:
        """The training data, as many samples as the workload says; at least one batch of it."""
        whole = self._whole()
        asked = 0 if self.info.defaults.encoded else self.parameters["samples"]
        samples = asked or len(whole.train_labels)
        if samples < self.batch:
            raise ValueError(f"{samples} samples hold no batch of {self.batch}")
        return dataclasses.replace(
            whole,
            train_images=whole.train_images[:samples],
            train_labels=whole.train_labels[:samples],
        )

    def _whole(self) -> DataSetArrays:
        if not self.info.defaults.encoded:
            return data.load(cast(str, self.info.dataset))
        from nfold.data.distortion import photograph_arrays

        return photograph_arrays(photographs.load(), self.parameters)

    def photographs(self) -> PackedJpegs | None:
        """The files of a workload whose images are files."""
        if not self.info.defaults.encoded:
            return None
        return photographs.load().train.first(self.parameters["samples"])


def run(main: Callable[[Job], None]) -> NoReturn:
    """Run an arm until the driver stops it; its exit hangs on no thread, group or graph."""
    die_with_parent()
    status = 1
    try:
        main(parsed(sys.argv[1:], Channel.taken()))
    except Stop:
        status = 0
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(status)


def parsed(arguments: list[str], channel: Channel) -> Job:
    """The job of a command line and of the environment's RANK, LOCAL_RANK and WORLD_SIZE."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workload", type=Workload.parse, required=True)
    parser.add_argument("--batch", type=int, required=True, help="over all devices")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--devices", type=int, default=1, help="that this process drives")
    parser.add_argument("--warmup", type=int, default=30)
    parser.add_argument("--field", action="append", default=[], metavar="NAME=VALUE")
    found = vars(parser.parse_args(arguments))
    fields = dict(text.split("=", 1) for text in found.pop("field"))
    return Job(
        **found,
        fields=fields,
        channel=channel,
        rank=int(os.environ.get("RANK", "0")),
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        world_size=int(os.environ.get("WORLD_SIZE", "1")),
    )
