"""How a change is written where PyTorch alone trains, and where a trainer does that is told things.

The trainers' names of settings are those of their documentation (transformers 5, Lightning 2,
Accelerate 1).
"""

from __future__ import annotations

from dataclasses import dataclass

from nfold.seen import Place, Seen, Trainer

SEARCHING = "LBFGS"
"""The optimizer of PyTorch's that calls a closure as often as its losses ask for."""


@dataclass(frozen=True, kw_only=True)
class Wording:
    """Its fields are what to write; ``{}`` is a setting as PyTorch calls it, ``name=value``.

    ``told`` are places whose change is not there, but where the trainer is made. ``reads`` and
    ``gathers`` change what lines of its ``package`` do in every step.
    """

    name: str = ""
    package: str = ""
    told: frozenset[str] = frozenset()
    wrapper: str = "DistributedDataParallel(..., {})"
    loader: str = "DataLoader(..., {})"
    batch: str = "batch_size"
    compiled: str = "torch.compile(model)"
    replayed: str = "torch.compile(model, mode='reduce-overhead')"
    moved: str = ".to(device, non_blocking=True)"
    half: str = "send half: model.register_comm_hook(None, {0}_compress_hook)"
    less_sent: str = (
        "send less often: an optimizer step after several batches, all but the last in "
        "model.no_sync()"
    )
    several: str = "an optimizer step after several batches"
    last_only: str = "all forwards and backwards but the last in model.no_sync()"
    rarely: str = "evaluate, log and save less often"
    divided: str = (
        "DataLoader(..., sampler=DistributedSampler(dataset)), and set_epoch in every epoch"
    )
    batch_norm: str = "BatchNorm in place of SyncBatchNorm, if the training allows it"
    process: str = "DistributedDataParallel(model), {}, "
    reads: str = ""
    gathers: str = ""

    def place(self, seen: Seen, what: str) -> str | None:
        """The line to change for what happens at a place, None where that is not known.

        Those of all wrappers: a GAN has two, and each sends its own gradients.
        """
        if what in self.told:
            return seen.first_place("trainer")
        if what == "loader":
            return seen.loader.place if seen.loader is not None else None
        if what == "wrapper":
            return ", ".join(sorted({one.where for one in seen.places.get(what, ())})) or None
        return seen.first_place(what)

    def does(self, place: Place) -> bool:
        """Whether it has a setting for what its own lines do there."""
        return bool(self.package) and str(place.inside).startswith(f"{self.package}/")


PYTORCH = Wording()
TRANSFORMERS = Wording(
    name="Hugging Face's Trainer",
    package="transformers",
    told=frozenset({"loader", "wrapper", "copy", "step"}),
    wrapper="TrainingArguments(..., ddp_{})",
    loader="TrainingArguments(..., dataloader_{})",
    batch="per_device_train_batch_size",
    compiled="TrainingArguments(..., torch_compile=True)",
    replayed="TrainingArguments(..., torch_compile_mode='reduce-overhead')",
    moved='TrainingArguments(..., accelerator_config={"non_blocking": True})',
    half="",
    less_sent="send less often: TrainingArguments(..., gradient_accumulation_steps=2)",
    several="gradient_accumulation_steps=2",
    rarely="larger eval_steps, logging_steps and save_steps",
    divided="TrainingArguments(..., use_cpu=True): without it ranks on CPU devices train alone",
    process="",
    reads="TrainingArguments(..., logging_nan_inf_filter=False)",
    gathers="TrainingArguments(..., average_tokens_across_devices=False)",
)
LIGHTNING = Wording(
    name="Lightning's Trainer",
    told=frozenset({"wrapper", "copy", "step"}),
    wrapper="Trainer(..., strategy=DDPStrategy({}))",
    moved="fewer bytes a sample: uint8, made floats on the device",
    half="send half: Trainer(..., strategy=DDPStrategy(ddp_comm_hook={0}_compress_hook))",
    less_sent="send less often: Trainer(..., accumulate_grad_batches=2)",
    several="accumulate_grad_batches=2",
    last_only="Trainer(..., accumulate_grad_batches=N): only the last of N is exchanged",
    rarely="a larger check_val_every_n_epoch or val_check_interval, log and save less often",
    divided="Trainer(..., use_distributed_sampler=True)",
    batch_norm="Trainer(..., sync_batchnorm=False), if the training allows it",
    process="Trainer(..., strategy='ddp'), ",
)
FABRIC = Wording(
    name="Lightning Fabric",
    told=frozenset({"wrapper"}),
    wrapper="Fabric(..., strategy=DDPStrategy({}))",
    moved="fewer bytes a sample: uint8, made floats on the device",
    half="",
    less_sent="send less often: an optimizer step after several batches, all but the last in "
    "fabric.no_backward_sync(model)",
    last_only="all forwards and backwards but the last in fabric.no_backward_sync(model)",
    divided="fabric.setup_dataloaders(loader)",
    process="Fabric(..., strategy='ddp'), ",
)
ACCELERATE = Wording(
    name="Accelerate",
    told=frozenset({"wrapper", "copy"}),
    wrapper="Accelerator(..., kwargs_handlers=[DistributedDataParallelKwargs({})])",
    moved="Accelerator(..., dataloader_config=DataLoaderConfiguration(non_blocking=True))",
    half="send half, by kwargs_handlers: "
    "DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.{1})",
    less_sent="send less often: Accelerator(..., gradient_accumulation_steps=2), and forward and "
    "backward in accelerator.accumulate(model)",
    last_only="all forwards and backwards but the last in accelerator.no_sync(model)",
    divided="accelerator.prepare(loader)",
    process="",
)
BY_TRAINER: dict[Trainer, Wording] = {
    "": PYTORCH,
    "transformers": TRANSFORMERS,
    "lightning": LIGHTNING,
    "fabric": FABRIC,
    "accelerate": ACCELERATE,
}


def of(seen: Seen) -> Wording:
    """For what trains this script."""
    return BY_TRAINER[seen.trainer]


def exchanged_by_itself(seen: Seen) -> str:
    """Which gradients a script must exchange itself; "" where a wrapper can.

    DistributedDataParallel sees the forward of a module, and sends a gradient after the hooks of
    its parameter, so that an optimizer that one of them steps would train with this rank's own.
    """
    if seen.in_backward:
        return (
            "each gradient in its hook, before its optimizer steps (DistributedDataParallel sends "
            "it after that)"
        )
    return "all gradients after backward()" if seen.by_hand and not seen.through_model else ""


def share(seen: Seen) -> str:
    """How ranks come to a part of the work each, and what else they must have alike.

    A line search goes on or not by the loss that its closure returns: where each rank has another
    one, their steps differ, and one waits for exchanges that the others never make.
    """
    part = "a DistributedSampler" if seen.loader is not None else "its own part of the work a rank"
    if SEARCHING not in seen.optimizers:
        return part
    return f"{part}, its closure returning the mean of all ranks' losses ({SEARCHING} goes by it)"
