"""The plans of an expert: changes of each script by hand, in the numerics classes of nfold tune."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "diagnosis"))

from timed_scripts import IMAGENET, NANOGPT  # noqa: E402

LOADER = ("shuffle=True)", "shuffle=True, num_workers=8, persistent_workers=True, pin_memory=True)")
CUDNN = "import torch; torch.backends.cudnn.benchmark = True"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The changes of an expert to one script.

    ``arguments`` replace those of the script, ``first_line`` goes before its code, and each of
    ``edits`` replaces a text that the file has once. ``other`` is a script in place of it.
    """

    arguments: tuple[str, ...] | None = None
    first_line: str = ""
    edits: tuple[tuple[str, str], ...] = ()
    other: Path | None = None

    def write(self, script: Path, folder: Path) -> Path:
        """Copy the script's folder with the changes to ``folder``; return the changed script."""
        shutil.copytree(script.parent, folder, dirs_exist_ok=True)
        changed = folder / script.name
        text = (self.other or script).read_text()
        for old, new in self.edits:
            if text.count(old) != 1:
                raise ValueError(f"{script.name} has {old!r} {text.count(old)} times, not once")
            text = text.replace(old, new)
        future = "from __future__ import annotations\n"
        place = text.find(future) + len(future) if future in text else 0
        changed.write_text(
            text[:place] + f"{self.first_line}\n" * bool(self.first_line) + text[place:]
        )
        return changed


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A script that is tuned, its arguments, and the expert's plan for it.

    ``modules`` must be installed. ``small`` are further arguments on CPU devices, None if it needs
    GPUs. ``{devices}`` in an argument is the number of devices.
    """

    script: Path
    arguments: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    small: tuple[str, ...] | None = ()
    expert: Plan

    def arguments_on(self, devices: str, chosen: Sequence[str] | None = None) -> list[str]:
        own = self.arguments if chosen is None else chosen
        small = (self.small or ()) if devices.startswith("cpu") else ()
        return [one.replace("{devices}", devices.rpartition(":")[2]) for one in (*own, *small)]


def subjects(public: Path) -> dict[str, Subject]:
    """The scripts by name; those of other projects are below ``public``."""
    own, diagnosis = HERE / "scripts", HERE.parent / "diagnosis" / "scripts"
    endless, tiny = ("--epochs", "1000"), ("--batch", "16", "--width", "8", "--images", "3200")
    nanogpt = (*NANOGPT, "--gradient_accumulation_steps={devices}")
    return {
        "imagenet": Subject(
            script=public / "examples/imagenet/main.py",
            arguments=IMAGENET,
            modules=("torchvision",),
            small=None,
            expert=Plan(arguments=(*IMAGENET, "--workers", "24"), first_line=CUDNN),
        ),
        "dataparallel": Subject(
            script=diagnosis / "dataparallel.py",
            arguments=endless,
            small=None,
            expert=Plan(other=diagnosis / "dataparallel_fixed.py"),
        ),
        "nanogpt": Subject(
            script=public / "nanoGPT/train.py",
            arguments=nanogpt,
            small=None,
            expert=Plan(
                arguments=tuple(one.replace("compile=False", "compile=True") for one in nanogpt)
            ),
        ),
        "text_trainer": Subject(
            script=own / "text_trainer.py",
            arguments=endless,
            modules=("transformers",),
            small=("--batch", "4", "--layers", "1", "--width", "64"),
            expert=Plan(
                edits=(
                    (
                        'report_to="none",',
                        'report_to="none", torch_compile=True, dataloader_num_workers=4, '
                        "ddp_find_unused_parameters=False,",
                    ),
                )
            ),
        ),
        **{
            f"{trainer}_images": Subject(
                script=own / f"{trainer}_images.py",
                arguments=endless,
                modules=(trainer,),
                small=tiny,
                expert=Plan(edits=(LOADER,), first_line=CUDNN),
            )
            for trainer in ("lightning", "accelerate")
        },
        "plain_images": Subject(
            script=own / "plain_images.py",
            arguments=endless,
            small=tiny,
            expert=Plan(other=own / "plain_images_expert.py"),
        ),
        "cifar_ddp": Subject(
            script=diagnosis / "cifar_ddp.py",
            arguments=(*endless, "--workers", "14"),
            modules=("pyarrow", "PIL"),
            small=None,
            expert=Plan(other=diagnosis / "cifar_ddp_fixed.py", arguments=endless),
        ),
    }
