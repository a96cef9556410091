"""Scripts for timed runs: scripts of this folder, public ones, and doses of dosed/ddp.py."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from own_clock import IN_TURNS
from targets import FOUND_IN, Script

HERE = Path(__file__).resolve().parent
DOSED = re.compile(r"ddp(?:\+(?P<cause>[\w-]+)=(?P<ms>[\d.]+))?(?:#(?P<seed>\d+))?")
IMAGENET = (
    *("--dummy", "--multiprocessing-distributed", "--world-size", "1", "--rank", "0"),
    *("--dist-url", "tcp://127.0.0.1:23456", "--arch", "resnet50"),
)
NANOGPT = ("--dataset=random", "--compile=False", "--eval_iters=1", "--eval_interval=1000")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A script with its arguments and the causes of which one must be reported first.

    ``{devices}`` in an argument is the number of devices. ``causes`` is empty for a script without
    a fault. It needs ``modules`` and, if ``cifar10``, that data set. ``cpu`` are further arguments
    on CPU devices, None if it needs GPUs.
    """

    script: Path
    arguments: tuple[str, ...] = ()
    causes: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    cifar10: bool = False
    cpu: tuple[str, ...] | None = ()
    environment: dict[str, str] = field(default_factory=dict)

    def command(self, devices: str) -> list[str]:
        """The script and ``--devices``, then ``--`` and its arguments."""
        count = devices.rpartition(":")[2]
        own = [*self.arguments, *((self.cpu or ()) if devices.startswith("cpu") else ())]
        own = [one.replace("{devices}", count) for one in own]
        return [str(self.script), "--devices", devices, *(["--", *own] if own else [])]

    def missing(self, devices: str) -> str:
        """Why it cannot run here; empty if it can."""
        if self.cpu is None and devices.startswith("cpu"):
            return "it needs GPUs"
        for module in self.modules:
            if importlib.util.find_spec(module) is None:
                return f"{module} is not installed"
        if not self.script.exists():
            return f"{self.script} does not exist; next: --public FOLDER"
        data = Path(os.environ.get("NFOLD_DATA", "data"), "cifar10")
        if self.cifar10 and not data.exists():
            return f"{data} does not exist; next: NFOLD_DATA"
        return ""


def cases(public: Path) -> dict[str, Case]:
    """The scripts by name; those of other projects are below ``public``."""
    own = HERE / "scripts"
    return {
        "with_trainer": Case(
            script=own / "with_trainer.py",
            causes=("input", "launch-bound"),  # no loader workers, and a tiny eager model
            modules=("transformers", "pyarrow", "PIL"),
            cifar10=True,
            cpu=("--layers=1", "--width=64"),
        ),
        "imagenet": Case(
            script=public / "examples/imagenet/main.py",
            arguments=IMAGENET,
            causes=("input",),
            modules=("torchvision",),
            cpu=None,
        ),
        "mnist": Case(
            script=public / "examples/mnist/main.py", causes=("input",), modules=("torchvision",)
        ),
        "nanogpt": Case(
            script=public / "nanoGPT/train.py",
            arguments=(*NANOGPT, "--gradient_accumulation_steps={devices}"),
            cpu=None,
        ),
        "resnet": Case(script=HERE / "strangers/resnet.py", cpu=("--batch=32", "--width=16")),
        "cifar_ddp": Case(
            script=own / "cifar_ddp.py",
            arguments=("--workers=14",),
            causes=("input", "epoch-boundary"),
            modules=("pyarrow", "PIL"),
            cifar10=True,
            cpu=None,
        ),
    }


def write_data(name: str, script: Path) -> None:
    """Write the files that the script reads, if there are none.

    They are random for public scripts. Those on CIFAR-10 keep decoded pictures in their first run,
    which a run under nfold cannot: it leaves no files.
    """
    if not script.exists():
        return
    if name in ("with_trainer", "cifar_ddp"):
        command = [sys.executable, "-c", "import pictures; pictures.cifar10()"]
        subprocess.run(
            command, cwd=script.parent, check=False
        )  # without the data, Case.missing tells
        return
    if name == "nanogpt":
        folder, shapes = script.parent / "data/random", {"train.bin": 1 << 24, "val.bin": 1 << 20}
        files = {file: random_tokens(count) for file, count in shapes.items()}
    elif name == "mnist":
        folder = script.parent.parent / "data/MNIST/raw"
        sizes = {"train": 60_000, "t10k": 10_000}
        files = {}
        for part, count in sizes.items():
            files[f"{part}-images-idx3-ubyte"] = idx(count, 28, 28, below=256)
            files[f"{part}-labels-idx1-ubyte"] = idx(count, below=10)
    else:
        return
    if folder.exists():
        return
    folder.mkdir(parents=True)
    for file, content in files.items():
        (folder / file).write_bytes(content)


def random_tokens(count: int) -> bytes:
    """Tokens of GPT-2's vocabulary as 16-bit numbers."""
    return np.random.default_rng(0).integers(50257, size=count, dtype=np.uint16).tobytes()


def idx(*shape: int, below: int) -> bytes:
    """Random bytes of this shape in the IDX format."""
    head = bytes((0, 0, 8, len(shape))) + np.array(shape, ">u4").tobytes()
    return head + np.random.default_rng(0).integers(below, size=shape, dtype=np.uint8).tobytes()


def dosed_case(name: str, devices: str, clock: Path) -> Case | None:
    """dosed/ddp.py with the cost that the name states; None for another name.

    What a dose counts, such as bytes, is calibrated once and kept in ``clock``.
    """
    found = DOSED.fullmatch(name)
    if found is None:
        return None
    cause, ms = found["cause"], float(found["ms"] or 0)
    wide = () if devices.startswith("cpu") else ("--width=288",)
    script = Script("ddp", devices, arguments=wide)
    if cause and cause not in script.causes:
        raise SystemExit(f"{name}: allowed causes are {', '.join(script.causes)}")
    if clock.exists():
        script.readings.read(clock)
    if cause in IN_TURNS:
        script.learn([{cause: ms}])
        script.readings.keep(clock)
    file, *rest = script.command()
    return Case(
        script=Path(file),
        arguments=tuple(rest[rest.index("--") + 1 :]),
        causes=(FOUND_IN.get(cause, cause),) if cause else (),
        environment=script.environment({cause: ms} if cause else {}, int(found["seed"] or 0)),
    )


def absolute_data() -> dict[str, str]:
    """NFOLD_DATA for a process in another folder."""
    return {"NFOLD_DATA": str(Path(os.environ.get("NFOLD_DATA", "data")).absolute())}
