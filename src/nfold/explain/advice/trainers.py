"""How a change is written where PyTorch alone trains, and where a trainer does that is told things.

The trainers' names of settings are those of their documentation (transformers 5, Lightning 2,
Accelerate 1).
"""

from __future__ import annotations

from dataclasses import dataclass

from nfold.core.script_profile import ScriptProfile, SourceLocation, TrainerKind

LINE_SEARCH_OPTIMIZER = "LBFGS"
"""The optimizer of PyTorch's that calls a closure as often as its losses ask for."""


@dataclass(frozen=True, kw_only=True)
class TrainerAdvice:
    """Its fields are what to write; ``{}`` is a setting as PyTorch calls it, ``name=value``.

    ``told`` are places whose change is not there, but where the trainer is made. ``reads`` and
    ``gathers`` change what lines of its ``package`` do in every step.
    """

    name: str = ""
    package: str = ""
    set_in_trainer: frozenset[str] = frozenset()
    wrapper: str = "DistributedDataParallel(..., {})"
    loader: str = "DataLoader(..., {})"
    batch: str = "batch_size"
    compiled: str = "torch.compile(model)"
    cuda_graphs: str = "torch.compile(model, mode='reduce-overhead')"
    non_blocking_copy: str = ".to(device, non_blocking=True)"
    half_gradients: str = "send half: model.register_comm_hook(None, {0}_compress_hook)"
    send_less_often: str = (
        "send less often: an optimizer step after several batches, all but the last in "
        "model.no_sync()"
    )
    accumulation: str = "an optimizer step after several batches"
    all_reduce_once: str = "all forwards and backwards but the last in model.no_sync()"
    evaluate_less_often: str = "evaluate, log and save less often"
    sampler: str = (
        "DataLoader(..., sampler=DistributedSampler(dataset)), and set_epoch in every epoch"
    )
    batch_norm: str = "BatchNorm in place of SyncBatchNorm, if the training allows it"
    launch: str = "DistributedDataParallel(model), {}, "
    fewer_reads: str = ""
    fewer_gathers: str = ""

    def location(self, profile: ScriptProfile, event: str) -> str | None:
        """The line to change for what happens at a place, None where that is not known.

        Those of all wrappers: a GAN has two, and each sends its own gradients.
        """
        if event in self.set_in_trainer:
            return profile.most_frequent_line("trainer")
        if event == "loader":
            return profile.loader.created_at if profile.loader is not None else None
        if event == "wrapper":
            return (
                ", ".join(sorted({one.line for one in profile.source_locations.get(event, ())}))
                or None
            )
        return profile.most_frequent_line(event)

    def has_setting_for(self, location: SourceLocation) -> bool:
        """Whether it has a setting for what its own lines do there."""
        return bool(self.package) and str(location.package_line).startswith(f"{self.package}/")


PYTORCH = TrainerAdvice()
TRANSFORMERS = TrainerAdvice(
    name="Hugging Face's Trainer",
    package="transformers",
    set_in_trainer=frozenset({"loader", "wrapper", "copy", "step"}),
    wrapper="TrainingArguments(..., ddp_{})",
    loader="TrainingArguments(..., dataloader_{})",
    batch="per_device_train_batch_size",
    compiled="TrainingArguments(..., torch_compile=True)",
    cuda_graphs="TrainingArguments(..., torch_compile_mode='reduce-overhead')",
    non_blocking_copy='TrainingArguments(..., accelerator_config={"non_blocking": True})',
    half_gradients="",
    send_less_often="send less often: TrainingArguments(..., gradient_accumulation_steps=2)",
    accumulation="gradient_accumulation_steps=2",
    evaluate_less_often="larger eval_steps, logging_steps and save_steps",
    sampler="TrainingArguments(..., use_cpu=True): without it ranks on CPU devices train alone",
    launch="",
    fewer_reads="TrainingArguments(..., logging_nan_inf_filter=False)",
    fewer_gathers="TrainingArguments(..., average_tokens_across_devices=False)",
)
LIGHTNING = TrainerAdvice(
    name="Lightning's Trainer",
    set_in_trainer=frozenset({"wrapper", "copy", "step"}),
    wrapper="Trainer(..., strategy=DDPStrategy({}))",
    non_blocking_copy="fewer bytes a sample: uint8, made floats on the device",
    half_gradients="send half: Trainer(..., strategy=DDPStrategy(ddp_comm_hook={0}_compress_hook))",
    send_less_often="send less often: Trainer(..., accumulate_grad_batches=2)",
    accumulation="accumulate_grad_batches=2",
    all_reduce_once="Trainer(..., accumulate_grad_batches=N): only the last of N is exchanged",
    evaluate_less_often="a larger check_val_every_n_epoch or val_check_interval, log and save less often",
    sampler="Trainer(..., use_distributed_sampler=True)",
    batch_norm="Trainer(..., sync_batchnorm=False), if the training allows it",
    launch="Trainer(..., strategy='ddp'), ",
)
FABRIC = TrainerAdvice(
    name="Lightning Fabric",
    set_in_trainer=frozenset({"wrapper"}),
    wrapper="Fabric(..., strategy=DDPStrategy({}))",
    non_blocking_copy="fewer bytes a sample: uint8, made floats on the device",
    half_gradients="",
    send_less_often="send less often: an optimizer step after several batches, all but the last in "
    "fabric.no_backward_sync(model)",
    all_reduce_once="all forwards and backwards but the last in fabric.no_backward_sync(model)",
    sampler="fabric.setup_dataloaders(loader)",
    launch="Fabric(..., strategy='ddp'), ",
)
ACCELERATE = TrainerAdvice(
    name="Accelerate",
    set_in_trainer=frozenset({"wrapper", "copy"}),
    wrapper="Accelerator(..., kwargs_handlers=[DistributedDataParallelKwargs({})])",
    non_blocking_copy="Accelerator(..., dataloader_config=DataLoaderConfiguration(non_blocking=True))",
    half_gradients="send half, by kwargs_handlers: "
    "DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.{1})",
    send_less_often="send less often: Accelerator(..., gradient_accumulation_steps=2), and forward and "
    "backward in accelerator.accumulate(model)",
    all_reduce_once="all forwards and backwards but the last in accelerator.no_sync(model)",
    sampler="accelerator.prepare(loader)",
    launch="",
)
BY_TRAINER: dict[TrainerKind, TrainerAdvice] = {
    "": PYTORCH,
    "transformers": TRANSFORMERS,
    "lightning": LIGHTNING,
    "fabric": FABRIC,
    "accelerate": ACCELERATE,
}


def trainer_advice(profile: ScriptProfile) -> TrainerAdvice:
    """For what trains this script."""
    return BY_TRAINER[profile.trainer]


def manual_all_reduce(profile: ScriptProfile) -> str:
    """Which gradients a script must exchange itself; "" where a wrapper can.

    DistributedDataParallel sees the forward of a module, and sends a gradient after the hooks of
    its parameter, so that an optimizer that one of them steps would train with this rank's own.
    """
    if profile.steps_in_backward:
        return (
            "each gradient in its hook, before its optimizer steps (DistributedDataParallel sends "
            "it after that)"
        )
    return (
        "all gradients after backward()"
        if profile.has_no_optimizer and not profile.model_samples_per_step
        else ""
    )


def divide_work(profile: ScriptProfile) -> str:
    """How ranks come to a part of the work each, and what else they must have alike.

    A line search goes on or not by the loss that its closure returns: where each rank has another
    one, their steps differ, and one waits for exchanges that the others never make.
    """
    part = (
        "a DistributedSampler" if profile.loader is not None else "its own part of the work a rank"
    )
    if LINE_SEARCH_OPTIMIZER not in profile.optimizers:
        return part
    return f"{part}, its closure returning the mean of all ranks' losses ({LINE_SEARCH_OPTIMIZER} goes by it)"
