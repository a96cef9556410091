"""How a script can send fewer bytes between its devices, with the line of user code."""

from __future__ import annotations

from nfold.core.script_profile import ScriptProfile
from nfold.explain.advice import trainers
from nfold.explain.advice.pytorch import at_location


def reduce_gradient_bytes(profile: ScriptProfile, *, half_tried: bool = False) -> str:
    """Advise on gradient bytes; ``half_tried``: half of them was measured to be no faster."""
    if profile.parallel == "fsdp":
        return (
            "shard less (reshard_after_forward=False), or not at all: DistributedDataParallel, if "
            "the model fits a device"
        )
    if profile.parallel != "ddp":
        own = profile.most_frequent("collective")
        by_hand = profile.parallel == "other" and own is not None and own.package_line is None
        text = f"{_use_ddp(profile)}; or " * by_hand
        return at_location(
            profile.most_frequent_line("collective"), f"{text}send less: bf16, or less often"
        )
    words = trainers.trainer_advice(profile)
    if profile.sparse_gradient_bytes:
        return at_location(words.location(profile, "wrapper"), _use_dense_gradients(profile))
    setting = halve_gradient_bytes(profile)
    if setting and not half_tried:
        return setting
    why = " (half of the bytes: no gain beyond the noise)" if half_tried else ""
    return at_location(words.location(profile, "wrapper"), f"{words.send_less_often}{why}")


def halve_gradient_bytes(profile: ScriptProfile) -> str:
    """Return the code that halves the gradient bytes, "" without such a setting.

    The bf16 hook of DistributedDataParallel needs NCCL; others use fp16.
    """
    words = trainers.trainer_advice(profile)
    if not (words.half_gradients and profile.sends_fp32_gradients):
        return ""
    kind = "bf16" if profile.backend == "nccl" else "fp16"
    return at_location(
        words.location(profile, "wrapper"), words.half_gradients.format(kind, kind.upper())
    )


def _use_ddp(profile: ScriptProfile) -> str:
    each = max((one.per_step for one in profile.collectives), default=0.0)
    many = f" ({each:.0f} collectives per step here)" * (each > 1)
    return f"DistributedDataParallel, which all-reduces buckets during backward{many}"


def _use_dense_gradients(profile: ScriptProfile) -> str:
    size = f"{profile.sparse_gradient_bytes / 1e6:,.2f} MB"
    return (
        f"every rank gathers the sparse gradients of all ranks; sparse=False all-reduces {size} per "
        "step instead"
    )
