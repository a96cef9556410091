"""How the prepared models of a script compute: changed between two steps of its training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nfold.core.plan import Plan
from nfold.engines.torch.nested_tensors import collect_tensors
from nfold.engines.torch.precision import uses_tf32
from nfold.engines.torch.run.automatic_plan import Candidate
from nfold.engines.torch.run.job import Job
from nfold.engines.torch.run.prepared_module import PreparedForward, prepared_forward
from nfold.engines.torch.run.state import RunBookkeeping
from nfold.instrument.torch_private import (
    has_module_hooks,
    is_compiled,
    is_compiled_wrapper,
)

COMPILE_S = 0.25  # to compile forward and backward, for every parameter tensor
# Largest relative difference of compiled outputs from eager ones, by the type of the arithmetic
TOLERANCE = {"fp32": 1e-3, "tf32": 1e-2, "bf16": 5e-2, "fp16": 2e-2}
RANDOM_FACTOR = 3.0  # of the difference of two eager passes with other random draws
SAMPLED_NUMBERS = 2**20  # of each output


@dataclass(eq=False)
class RunPlanSwitch:
    """Switches the execution of a run's prepared models; see ``PlanSwitch``.

    ``is_captured``: a decorated step is a CUDA graph, which contains forward and backward. In a step
    that is not, forward and backward of a compiled model are graphs of their own.
    """

    plan: Plan
    job: Job
    bookkeeping: RunBookkeeping
    is_captured: bool = False

    @property
    def models(self) -> list[nn.Module]:
        return self.bookkeeping.prepared.models

    @property
    def initial_step(self) -> str:
        return "captured" if self.is_captured else "eager"

    def candidate(self) -> Candidate | None:
        if not self._can_compile():
            return None
        tensors = sum(len(list(model.parameters())) for model in self.models)
        steps = ("compiled+captured",) if self.is_captured else ("compiled", "compiled+captured")
        return Candidate(steps=steps, cost_s=COMPILE_S * tensors)

    def _can_compile(self) -> bool:
        modules = [each for model in self.models for each in model.modules()]
        inner = [each for each in modules if each not in self.models]
        return not (
            self.plan.batch_norm == "synchronised"
            or torch.are_deterministic_algorithms_enabled()
            or any(is_compiled(each) or is_compiled_wrapper(each) for each in modules)
            or any(has_module_hooks(each) for each in inner)
        )

    def fingerprint(self) -> str:
        gpu = torch.cuda.get_device_properties(self.job.device)
        parameters = [
            (p.shape, p.dtype, p.requires_grad) for m in self.models for p in m.parameters()
        ]
        facts = (torch.__version__, gpu.name, gpu.total_memory, self.job.world_size)
        batches = [loader.config.division.batch for loader in self.bookkeeping.prepared.loaders]  # type: ignore[attr-defined]
        return repr((facts, self.plan, self.is_captured, batches, self.models, parameters))

    def apply(self, step: str, *, check: bool) -> None:
        for model in self.models:
            forward = prepared_forward(model)
            forward.reference = EagerReference if check else None
            forward.select_step(self._step_of_models(step))

    def settle(self, step: str) -> None:
        for model in self.models:
            prepared_forward(model).settle_on(self._step_of_models(step))
        if self.job.device.type == "cuda":
            torch.cuda.empty_cache()  # memory of the steps that were tried

    def lacks_memory(self) -> bool:
        device = self.job.device
        if device.type != "cuda":
            return False
        peak = torch.cuda.max_memory_allocated(device)
        free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - peak
        return free < peak - torch.cuda.memory_allocated(device)

    def _step_of_models(self, step: str) -> str:
        if "compiled" not in step:
            return "eager"
        return "compiled" if self.is_captured else step

    def note(self) -> str | None:
        graphs = [prepared_forward(model).graphs for model in self.models]
        failure = next((one.failure for one in graphs if one and one.is_used and one.failure), None)
        return f"a part of it is not a CUDA graph: {failure}" if failure else None

    def failure(self) -> str | None:
        return next(filter(None, (prepared_forward(model).failure for model in self.models)), None)


class EagerReference:
    """Outputs of two eager passes of a model, without effect on its buffers and random draws.

    They differ from each other if the model draws random numbers, such as dropout.
    """

    def __init__(self, forward: PreparedForward, module: nn.Module, args: Any, kwargs: Any) -> None:
        rounds_more = forward.precision == "fp32" and uses_tf32(forward.device)
        self._tolerance = TOLERANCE["tf32" if rounds_more else forward.precision]
        buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
        devices = [forward.device] if forward.device.type == "cuda" else []
        with torch.no_grad(), torch.random.fork_rng(devices):
            self._first, second = (
                sample_outputs(forward.compute_eagerly(args, kwargs)) for _ in range(2)
            )
            for buffer, before in buffers:
                buffer.copy_(before)
        self._spread = relative_difference(second, self._first)

    def describe_difference(self, outputs: Any) -> str | None:
        """Return how compiled outputs differ from the eager ones beyond the tolerance, or None."""
        difference = relative_difference(sample_outputs(outputs), self._first)
        limit = max(self._tolerance, RANDOM_FACTOR * self._spread)
        if difference <= limit:
            return None
        return f"compiled outputs differ from eager ones by {difference:.2g} (allowed: {limit:.2g})"


def sample_outputs(outputs: Any) -> list[Tensor]:
    """Return at most SAMPLED_NUMBERS numbers of every floating-point tensor, in fp32."""
    tensors = (t.detach().flatten() for t in collect_tensors(outputs) if t.is_floating_point())
    return [t[:: max(1, t.numel() // SAMPLED_NUMBERS)].float() for t in tensors]


def relative_difference(values: list[Tensor], reference: list[Tensor]) -> float:
    """Return the norm of the difference over that of ``reference``; NaN and inf count as 1."""
    if not reference:
        return 0.0
    error = sum((a - b).square().sum() for a, b in zip(values, reference, strict=True))
    norm = sum(b.square().sum() for b in reference)
    ratio = float((torch.as_tensor(error) / torch.as_tensor(norm).clamp_min(1e-30)).sqrt())
    return ratio if ratio < 1 else 1.0
