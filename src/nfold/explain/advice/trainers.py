"""How a change is written for plain PyTorch and for each trainer.

Settings are named as in the documentation of transformers 5, Lightning 2 and Accelerate 1.
"""

from __future__ import annotations

from dataclasses import dataclass

from nfold.core.script_profile import ScriptProfile, SourceLocation, TrainerKind


@dataclass(frozen=True, kw_only=True)
class TrainerAdvice:
    """The code of every change; ``{}`` is a PyTorch setting, ``name=value``.

    ``set_in_trainer`` are events whose change belongs to the line that creates the trainer.
    ``fewer_reads`` and ``fewer_gathers`` change what lines of ``package`` do in every step.
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
    half_gradients: str = "model.register_comm_hook(None, {0}_compress_hook)"
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
        """Return the line to change for an event, None if unknown. Of wrappers, return all lines: a
        GAN has two.
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
        """Return whether the trainer has a setting for what its own line does there."""
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
    send_less_often="TrainingArguments(..., gradient_accumulation_steps=2), to send less often",
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
    half_gradients="Trainer(..., strategy=DDPStrategy(ddp_comm_hook={0}_compress_hook))",
    send_less_often="Trainer(..., accumulate_grad_batches=2), to send less often",
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
    half_gradients="Accelerator(..., kwargs_handlers=[DistributedDataParallelKwargs("
    "comm_hook=DDPCommunicationHookType.{1})])",
    send_less_often="Accelerator(..., gradient_accumulation_steps=2), and forward and backward in "
    "accelerator.accumulate(model), to send less often",
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
    return BY_TRAINER[profile.trainer]


def manual_all_reduce(profile: ScriptProfile) -> str:
    """Return which gradients a script must all-reduce itself, "" if a wrapper can.

    DistributedDataParallel needs the forward of a module, and all-reduces a gradient after the hooks
    of its parameter: an optimizer step in a hook uses the gradient of one rank.
    """
    if profile.steps_in_backward:
        return (
            "each gradient in its hook, before its optimizer steps (DistributedDataParallel "
            "all-reduces it after that)"
        )
    return (
        "all gradients after backward()"
        if profile.has_no_optimizer and not profile.model_samples_per_step
        else ""
    )


def divide_work(profile: ScriptProfile) -> str:
    return (
        "a DistributedSampler"
        if profile.loader is not None
        else "its own share of the work on each rank"
    )
