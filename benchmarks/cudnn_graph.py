"""cuDNN's fused graphs over torch tensors, through its C interface.

The Python frontend of cuDNN (1.32) has no operation for batch norm's weight gradients.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

TYPES: dict[str, Any] = {
    "INT64": ctypes.c_int64,
    "FLOAT": ctypes.c_float,
    "BOOLEAN": ctypes.c_bool,
    **dict.fromkeys(["HANDLE", "VOID_PTR", "BACKEND_DESCRIPTOR"], ctypes.c_void_p),
}
DTYPES = {torch.float16: "HALF", torch.bfloat16: "BFLOAT16", torch.float32: "FLOAT"}


class CuDNN:
    """The library that torch has loaded; codes are read from its header."""

    def __init__(self) -> None:
        wheel = Path(torch.__file__).parents[1] / "nvidia/cudnn"
        library = wheel / "lib/libcudnn.so.9"
        self.library = ctypes.CDLL(str(library) if library.exists() else library.name)
        headers = [wheel / "include/cudnn_graph_v9.h", Path("/usr/include/cudnn_graph_v9.h")]
        text = next(header for header in headers if header.exists()).read_text()
        codes = re.findall(r"(CUDNN_\w+)(?:\s+CUDNN_DEPRECATED_ENUM)?\s*=\s*(\d+)", text)
        self.codes = {name: int(code) for name, code in codes}

    def call(self, function: str, *arguments: Any) -> None:
        if status := getattr(self.library, function)(*arguments):
            message = ctypes.create_string_buffer(1000)
            self.library.cudnnGetLastErrorString(message, ctypes.c_size_t(1000))
            raise RuntimeError(f"{function}: {status}: {message.value.decode()[:300]}")

    def handle(self) -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        self.call("cudnnCreate", ctypes.byref(handle))
        return handle

    def create(self, kind: str) -> ctypes.c_void_p:
        descriptor = ctypes.c_void_p()
        code = self.codes[f"CUDNN_BACKEND_{kind}_DESCRIPTOR"]
        self.call("cudnnBackendCreateDescriptor", code, ctypes.byref(descriptor))
        return descriptor

    def make(self, kind: str, **attributes: Any) -> int:
        """A descriptor with attributes: a descriptor, or a type and its values (codes by name)."""
        descriptor = self.create(kind)
        prefix = kind.replace("BACKWARD", "BWD").replace("GEN_STATS", "GENSTATS")
        prefix = prefix.replace("NORM_FORWARD", "NORM_FWD")
        for name, value in attributes.items():
            single = ("BACKEND_DESCRIPTOR", value)
            of_type, *values = value if isinstance(value, tuple) else single
            values = [self.codes[v] if isinstance(v, str) else v for v in values]
            array = (TYPES.get(of_type, ctypes.c_int) * len(values))(*values)
            code, type_ = (
                self.codes[f"CUDNN_ATTR_{prefix}_{name}"],
                self.codes[f"CUDNN_TYPE_{of_type}"],
            )
            count = ctypes.c_int64(len(values))
            self.call("cudnnBackendSetAttribute", descriptor, code, type_, count, array)
        self.call("cudnnBackendFinalize", descriptor)
        return int(descriptor.value or 0)

    def get(self, descriptor: int, name: str, of_type: str, array: Any) -> int:
        found = ctypes.c_int64()
        code, type_ = self.codes[f"CUDNN_ATTR_{name}"], self.codes[f"CUDNN_TYPE_{of_type}"]
        owner, wanted = ctypes.c_void_p(descriptor), ctypes.c_int64(len(array))
        reference = ctypes.byref(found)
        self.call("cudnnBackendGetAttribute", owner, code, type_, wanted, reference, array)
        return min(found.value, len(array))


class Graph:
    """Operations on named tensors. All sets of tensors have the same shapes."""

    FLOAT = ("DATA_TYPE", "CUDNN_DATA_FLOAT")

    def __init__(self, cudnn: CuDNN, sets: list[dict[str, Tensor]]) -> None:
        self.cudnn, self.sets = cudnn, sets
        self.tensors: dict[str, int] = {}
        self.operations: list[int] = []
        self.plans: list[tuple[int, int]] = []
        self.intermediates = 0

    def tensor(self, name: str, *, intermediate: bool = False) -> int:
        """The tensor `name`, or a new intermediate one in float32 of its shape."""
        if name in self.tensors and not intermediate:
            return self.tensors[name]
        like = self.sets[0][name]
        images = like.dim() == 4
        number = like.numel()
        self.intermediates += intermediate
        made = self.cudnn.make(
            "TENSOR",
            DATA_TYPE=self.FLOAT
            if intermediate
            else ("DATA_TYPE", f"CUDNN_DATA_{DTYPES[like.dtype]}"),
            DIMENSIONS=("INT64", *(like.shape if images else (1, number, 1, 1))),
            STRIDES=("INT64", *(like.stride() if images else (number, 1, number, number))),
            UNIQUE_ID=(
                "INT64",
                1000 + self.intermediates if intermediate else 1 + len(self.tensors),
            ),
            BYTE_ALIGNMENT=("INT64", 16),
            IS_VIRTUAL=("BOOLEAN", intermediate),
            IS_BY_VALUE=("BOOLEAN", like.device.type == "cpu" and number == 1),
        )
        if not intermediate:
            self.tensors[name] = made
        return made

    def add(self, kind: str, **attributes: Any) -> None:
        """Add an operation; tensors by name or descriptor."""
        found = {k: self.tensor(v) if isinstance(v, str) else v for k, v in attributes.items()}
        self.operations.append(self.cudnn.make(f"OPERATION_{kind}", **found))

    def pointwise(self, mode: str, first: Any, second: Any, shape: str, out: str = "") -> int:
        """Combine two tensors; RELU_BWD: the gradient and the input of ReLU."""
        target = self.tensor(out) if out else self.tensor(shape, intermediate=True)
        code = ("POINTWISE_MODE", f"CUDNN_POINTWISE_{mode}")
        how = self.cudnn.make("POINTWISE", MODE=code, MATH_PREC=self.FLOAT)
        if mode == "RELU_BWD":
            tensors = {"DYDESC": first, "XDESC": second, "DXDESC": target}
        else:
            tensors = {"XDESC": first, "YDESC": target} | ({"BDESC": second} if second else {})
        self.add("POINTWISE", PW_DESCRIPTOR=how, **tensors)
        return target

    def normalized(self, name: str, scale: str, bias: str) -> int:
        """`name` × scale + bias, per channel."""
        scaled = self.pointwise("MUL", name, scale, name)
        return self.pointwise("ADD", scaled, bias, name)

    def convolution(self, kind: str, **tensors: Any) -> None:
        """A 3 × 3 convolution, or its BACKWARD_DATA or BACKWARD_FILTER."""
        names = ["PRE_PADDINGS", "POST_PADDINGS", "FILTER_STRIDES", "DILATIONS"]
        how = self.cudnn.make(
            "CONVOLUTION",
            COMP_TYPE=self.FLOAT,
            CONV_MODE=("CONVOLUTION_MODE", "CUDNN_CROSS_CORRELATION"),
            SPATIAL_DIMS=("INT64", 2),
            **dict.fromkeys(names, ("INT64", 1, 1)),
        )
        factors = {"ALPHA": ("FLOAT", 1.0), "BETA": ("FLOAT", 0.0)}
        self.add(f"CONVOLUTION_{kind}", CONV_DESC=how, **factors, **tensors)

    def sum(self, of: Any, out: str) -> None:
        """Sum over all but the channels."""
        add = ("REDUCTION_OPERATOR_TYPE", "CUDNN_REDUCE_TENSOR_ADD")
        how = self.cudnn.make("REDUCTION", OPERATOR=add, COMP_TYPE=self.FLOAT)
        self.add("REDUCTION", DESC=how, XDESC=of, YDESC=out)

    def build(self, plans: int) -> Graph:
        """Create at most so many plans, of the best engines by cuDNN's heuristic."""
        self.handle = self.cudnn.handle()
        owner = ("HANDLE", self.handle.value)
        operations = ("BACKEND_DESCRIPTOR", *self.operations)
        graph = self.cudnn.make("OPERATIONGRAPH", HANDLE=owner, OPS=operations)
        mode = ("HEUR_MODE", "CUDNN_HEUR_MODE_A")
        heuristic = self.cudnn.make("ENGINEHEUR", OPERATION_GRAPH=graph, MODE=mode)
        created = [self.cudnn.create("ENGINECFG").value for _ in range(plans)]
        configs = (ctypes.c_void_p * plans)(*created)
        name = "ENGINEHEUR_RESULTS"
        count = self.cudnn.get(heuristic, name, "BACKEND_DESCRIPTOR", configs)
        error = RuntimeError("no engine supports this graph")
        for config in configs[:count]:
            try:
                plan = self.cudnn.make("EXECUTION_PLAN", HANDLE=owner, ENGINE_CONFIG=config)
            except RuntimeError as failed:
                error = failed
                continue
            size = (ctypes.c_int64 * 1)()
            self.cudnn.get(plan, "EXECUTION_PLAN_WORKSPACE_SIZE", "INT64", size)
            self.plans.append((plan, size[0]))
        if not self.plans:
            raise error
        return self

    def runners(self) -> list[Callable[[int], None]]:
        """Each plan as a function that runs it on the set of a number."""
        return [self._runner(plan, size) for plan, size in self.plans]

    def _runner(self, plan: int, size: int) -> Callable[[int], None]:
        workspace = torch.empty(max(size, 16), dtype=torch.uint8, device="cuda")
        ids = ("INT64", *range(1, 1 + len(self.tensors)))
        space = ("VOID_PTR", workspace.data_ptr())
        packs = []
        for tensors in self.sets:
            pointers = ("VOID_PTR", *(tensors[name].data_ptr() for name in self.tensors))
            packs.append(
                self.cudnn.make(
                    "VARIANT_PACK", UNIQUE_IDS=ids, DATA_POINTERS=pointers, WORKSPACE=space
                )
            )

        def run(number: int, _keep: Tensor = workspace) -> None:
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            self.cudnn.call("cudnnSetStream", self.handle, stream)
            pack = ctypes.c_void_p(packs[number % len(packs)])
            self.cudnn.call("cudnnBackendExecute", self.handle, ctypes.c_void_p(plan), pack)

        return run
