"""The private names of PyTorch that nfold uses. Each exists in PyTorch 2.9 to 2.13.

Only ``nfold.launch``, which must not import torch, has private names of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import profiler
from torch.distributed import distributed_c10d
from torch.nn.modules import batchnorm
from torch.utils.data import dataloader
from torch.utils.data._utils import fetch

BatchNorm = batchnorm._BatchNorm
BaseDataLoaderIter = dataloader._BaseDataLoaderIter
# The code that starts the workers of a DataLoader, and the code that ends them.
WORKER_STARTS = (
    dataloader._MultiProcessingDataLoaderIter.__init__.__code__,
    dataloader._MultiProcessingDataLoaderIter._shutdown_workers.__code__,
)
FETCHERS = (fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher)
foreach_add = torch._foreach_add_
foreach_copy = torch._foreach_copy_
foreach_mul = torch._foreach_mul_
is_functorch_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
# Context in which functions do not call ``__torch_function__`` of subclasses of Tensor.
no_torch_function: Any = torch._C.DisableTorchFunctionSubclass
default_store: Any = distributed_c10d._get_default_store
new_shared_storage: Any = torch.UntypedStorage._new_shared
# Calls a function at the end of the current backward, as DistributedDataParallel and FSDP do.
queue_backward_callback: Any = torch.autograd.Variable._execution_engine.queue_callback

# Methods that are patched.
NEXT_INDEX = "_next_index"  # of BaseDataLoaderIter
REGISTER_BUILTIN_HOOK = "_register_builtin_comm_hook"  # of DistributedDataParallel
SYNC_BUFFERS = "_sync_buffers"  # of DistributedDataParallel
CHECKPOINT_AUTOCAST = "_get_autocast_kwargs"  # torch.utils.checkpoint calls it once per function


def base(view: Tensor) -> Tensor | None:
    """Return the tensor whose memory a view shares."""
    return view._base


def version(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place."""
    return tensor._version


def coo_bytes(tensor: Tensor) -> int:
    """Return the bytes of a COO tensor, which need not be coalesced."""
    return tensor._values().nbytes + tensor._indices().nbytes


def check_input_dimensions(layer: batchnorm._BatchNorm, x: Tensor) -> None:
    layer._check_input_dim(x)  # type: ignore[no-untyped-call]


def is_compiled(module: nn.Module) -> bool:
    """Return whether ``module.compile()`` was called."""
    return getattr(module, "_compiled_call_impl", None) is not None


def is_compiled_wrapper(module: nn.Module) -> bool:
    """Return whether the module is the result of ``torch.compile(module)``."""
    return "_orig_mod" in module._modules


def has_module_hooks(module: nn.Module) -> bool:
    """Return whether a forward or backward of the module calls hooks."""
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks
    return any(hooks)


def is_flat_parameter(parameter: Tensor) -> bool:
    """Return whether FullyShardedDataParallel made the parameter."""
    return hasattr(parameter, "_is_flat_param")


def is_profiling() -> bool:
    return profiler._is_profiler_enabled


def ddp_logging_data(ddp: Any) -> dict[str, Any]:
    logged: dict[str, Any] = ddp._get_ddp_logging_data()
    return logged


def collective_count() -> int:
    """Return how many collectives the default process group has started on this rank."""
    group: Any = distributed_c10d.GroupMember.WORLD
    count: int = group._get_sequence_number_for_group()
    return count


def nccl_options(timeout: timedelta) -> Any:
    options = distributed_c10d.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return options


def storage_uses(tensor: Tensor) -> int:
    """Return how many tensors have the memory of this one, with it."""
    storage = tensor.untyped_storage()
    uses: int = torch._C._storage_Use_Count(storage._cdata)
    return uses - 1  # without ``storage``


def mark_boxed(function: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Tell AOTAutograd that a function takes its inputs as one list."""
    function._boxed_call = True  # type: ignore[attr-defined]
    return function


def wrap_inductor(
    graph_module: Any, inputs: Any, wrap: Callable[[Any, Callable[..., Any], set[int], bool], Any]
) -> Any:
    """Compile a graph of TorchDynamo by Inductor; return what AOTAutograd makes of it.

    ``wrap(graph, compiled, static, backward)`` replaces each compiled forward and backward, which
    takes a list of tensors; ``static`` are the indices of parameters and buffers among them. Graphs
    without gradients are not wrapped.
    """
    from torch._functorch import config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    def compile_inner(module: Any, example_inputs: Any, **options: Any) -> Any:
        compiled = compile_fx_inner(module, example_inputs, **options)
        if options.get("is_inference"):
            return compiled
        static = set(options.get("static_input_idxs") or ())
        return wrap(module, compiled, static, bool(options.get("is_backward")))

    with config.patch(enable_autograd_cache=False):  # which returns compiled functions unwrapped
        return compile_fx(graph_module, inputs, inner_compile=compile_inner)
