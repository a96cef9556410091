"""cnn10's nine convolution layers with cuDNN's fused graphs, against compiled layers, on one GPU.

    python benchmarks/fused_convolution.py --out fused.json [--seconds 60] [--tuned]

A layer is a convolution, batch norm and ReLU, batch 512, channels_last. The reference is what a
compiled step runs: cuDNN's convolutions, and Inductor's kernels for the rest. Other ways:

- fused (fp16): the convolution normalizes its input and sums its output (scale-bias-ReLU-conv-
  genstats), its weight gradient normalizes the input too (ConvBNwgrad), and its input gradient
  forms the sums of the previous layer's batch norm (DgradDreluBNBwdWeight).
- norm (bf16): batch norm and ReLU by cuDNN's NormAddRelu; cnn10 has nothing to add.
- sums (bf16): convolution and input gradient with sums of their output.

A stage's first layer reads pooled images, which nothing normalizes; its last layer normalizes its
output for pooling. The first layer's images have 8 channels, which cuDNN requires. Every time is
of a CUDA graph of 50 calls on three sets of tensors in turn; variants alternate in random order,
and a deviation compares a graph's outputs with torch's. No stage starts after --seconds.
--tuned compiles as `kernels: tuned` does, which takes minutes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config
from cudnn_graph import CuDNN, Graph
from torch import Tensor

from nfold.engines.torch.step.forward import TUNING_OPTIONS
from nfold.workloads.networks import CNN10_STAGES

BATCH, SIDE, SETS, CALLS, ROUNDS = 512, 32, 3, 50, 10
STEP_US = 2840.0  # one step of cnn10, batch 512, tuned kernels, bf16, H200
WAYS = {"fused": "float16", "norm": "bfloat16", "sums": "bfloat16"}
AXES = (0, 2, 3)
VECTORS = ("v1", "v2", "v3", "v4", "v5", "v6")
Run = Callable[[int], Any]
Results = dict[str, dict[str, Any]]
fused_by_inductor = torch.compile(dynamic=False)


def spread(channels: Tensor) -> Tensor:
    return channels[None, :, None, None]


@fused_by_inductor
def norm_relu(y: Tensor, gamma: Tensor, beta: Tensor, running: Tensor) -> tuple[Tensor, ...]:
    variance, mean = torch.var_mean(y.float(), AXES, correction=0)
    inverse = torch.rsqrt(variance + 1e-5)
    z = (y.float() - spread(mean)) * spread(inverse * gamma) + spread(beta)
    running = 0.9 * running + 0.1 * torch.stack([mean, variance])
    return torch.relu(z).to(y.dtype), mean, inverse, running


@fused_by_inductor
def norm_relu_backward(
    dz: Tensor, z: Tensor, y: Tensor, mean: Tensor, inverse: Tensor, gamma: Tensor
) -> tuple[Tensor, ...]:
    g = torch.where(z <= 0, 0, dz).float()
    centered = y.float() - spread(mean)
    total, product = g.sum(AXES), (g * centered).sum(AXES)
    count = y.numel() // y.shape[1]
    dy = g - centered * spread(product / count * inverse**2) - spread(total / count)
    return (dy * spread(inverse * gamma)).to(y.dtype), product * inverse, total


@fused_by_inductor
def finalize(
    total: Tensor, squares: Tensor, gamma: Tensor, beta: Tensor, running: Tensor, like: Tensor
) -> tuple[Tensor, ...]:
    count = like.numel() // like.shape[1]
    mean = total / count
    variance = squares / count - mean**2
    inverse = torch.rsqrt(variance + 1e-5)
    scale, kept = inverse * gamma, 0.9 * running + 0.1 * torch.stack([mean, variance])
    return scale.to(like.dtype), (beta - mean * scale).to(like.dtype), mean, inverse, kept


@fused_by_inductor
def apply_relu(y: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    return torch.relu(y.float() * spread(scale) + spread(bias)).to(y.dtype)


@fused_by_inductor
def apply_gradient(g: Tensor, y: Tensor, of_g: Tensor, of_y: Tensor, bias: Tensor) -> Tensor:
    return (g.float() * spread(of_g) + y.float() * spread(of_y) + spread(bias)).to(y.dtype)


@fused_by_inductor
def gradient_of_sums(
    g: Tensor, y: Tensor, mean: Tensor, inverse: Tensor, gamma: Tensor, total: Tensor, gy: Tensor
) -> Tensor:
    count = y.numel() // y.shape[1]
    of_y = (gy - mean * total) / count * inverse**2
    dy = g.float() - (y.float() - spread(mean)) * spread(of_y) - spread(total / count)
    return (dy * spread(inverse * gamma)).to(y.dtype)


def gradients(dy: Tensor, x: Tensor, w: Tensor, *, data: bool) -> tuple[Tensor, ...]:
    wanted = [data and x.shape[1] > 8, True, False]
    found: tuple[Tensor, ...] = torch.ops.aten.convolution_backward(
        dy, x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, wanted
    )
    return found


class Layer:
    """One layer in one precision: sets of tensors, cuDNN's graphs and the compared variants."""

    def __init__(self, stage: int, position: int, dtype: torch.dtype) -> None:
        self.outputs = CNN10_STAGES[stage]
        self.inputs = CNN10_STAGES[stage - (not position)] if stage or position else 8
        self.side, self.dtype = SIDE >> stage, dtype
        self.first, self.last = position == 0, position == 2
        self.name = f"{3 * stage + position + 1} {self.inputs}>{self.outputs}@{self.side}"
        self.sets = [self._tensors() for _ in range(SETS)]
        self.futures: dict[str, Future[Graph]] = {}

    def _images(self, channels: int) -> Tensor:
        made = torch.randn(BATCH, channels, self.side, self.side, device="cuda", dtype=self.dtype)
        return made.to(memory_format=torch.channels_last)

    def _tensors(self) -> dict[str, Tensor]:
        before, dz = self._images(self.inputs), self._images(self.outputs)
        variance, mean = torch.var_mean(before.float(), AXES, correction=0)
        inverse, shift = torch.rsqrt(variance + 1e-5), -mean * torch.rsqrt(variance + 1e-5)
        t = {"before": before, "dz": dz, "before_mean": mean, "before_inverse": inverse}
        t |= {"scale32": inverse, "bias32": shift, "one": 0 * mean + 1, "zero": 0 * mean}
        t |= {"scale": inverse.to(self.dtype), "bias": shift.to(self.dtype)}
        t["x"] = x = torch.relu(before.float() * spread(inverse) + spread(shift)).to(self.dtype)
        w = torch.randn(self.outputs, self.inputs, 3, 3, device="cuda", dtype=self.dtype)
        t["w"] = w.mul_((4.5 * self.inputs) ** -0.5).to(memory_format=torch.channels_last)
        t["y"] = y = torch.conv2d(x, t["w"], padding=1)
        gamma = torch.ones(self.outputs, device="cuda")
        t |= {"gamma": gamma, "beta": 0 * gamma, "running": torch.stack([0 * gamma, gamma])}
        t["z"], t["mean"], t["inverse"], _ = norm_relu(y, gamma, t["beta"], t["running"])
        t["dy"], *_ = norm_relu_backward(dz, t["z"], y, t["mean"], t["inverse"], gamma)
        t |= {"out": 0 * y, "out_x": 0 * x, "out_w": 0 * t["w"]}
        t |= {"g": torch.where(t["z"] > 0, dz, 0)}
        t |= {name: gamma.clone() for name in ("sum", "squares", *VECTORS)}
        t |= {name: mean.clone() for name in ("dscale", "dbias", "of_g", "of_y", "of_1")}
        return t | {"epsilon": torch.tensor([1e-5]), "momentum": torch.tensor([0.1])}

    def graphs(self, cudnn: CuDNN) -> dict[str, Callable[[], Graph]]:
        """Builders of cuDNN's graphs by name."""
        half = self.dtype == torch.float16
        describe = {"stats": self._stats} if half else {"norm": self._norm, "sums": self._sums}
        if not self.first:
            more = {"wgrad": self._wgrad, "dgrad": self._dgrad}
            describe |= more if half else {"dsums": self._dsums}
        plans = 8 if half else 4  # plans in bf16 are compiled

        def build(name: str) -> Graph:
            graph = Graph(cudnn, self.sets)
            describe[name](graph)
            return graph.build(plans)

        return {name: lambda name=name: build(name) for name in describe}

    def _active(self, graph: Graph) -> int:
        normal = graph.normalized("before", "scale", "bias")
        return graph.pointwise("RELU_FWD", normal, None, "before")

    def _stats(self, graph: Graph) -> None:
        graph.convolution("FORWARD", X="x" if self.first else self._active(graph), W="w", Y="out")
        mode = ("GENSTATS_MODE", "CUDNN_GENSTATS_SUM_SQSUM")
        sums = {"XDESC": "out", "SUMDESC": "sum", "SQSUMDESC": "squares"}
        graph.add("GEN_STATS", MODE=mode, MATH_PREC=graph.FLOAT, **sums)

    def _wgrad(self, graph: Graph) -> None:
        graph.convolution("BACKWARD_FILTER", X=self._active(graph), DY="dy", DW="out_w")

    def _dgrad(self, graph: Graph) -> None:
        dx = graph.tensor("before", intermediate=True)
        graph.convolution("BACKWARD_DATA", DY="dy", W="w", DX=dx)
        centered = graph.pointwise("SUB", "before", "before_mean", "before")
        unit = graph.pointwise("MUL", centered, "before_inverse", "before")
        scaled = graph.pointwise("MUL", unit, "one", "before")
        normal = graph.pointwise("ADD", scaled, "zero", "before")
        graph.pointwise("RELU_BWD", dx, normal, "before", out="out_x")
        inputs = {"MEAN": "before_mean", "INVSTD": "before_inverse", "BN_SCALE": "one"}
        inputs |= {"X": "before", "DY": "out_x", "DBN_SCALE": "dscale", "DBN_BIAS": "dbias"}
        inputs |= {"EQ_DY_SCALE": "of_g", "EQ_X_SCALE": "of_y"}
        tensors = {f"{role}_DESC": name for role, name in inputs.items()}
        graph.add("BN_BWD_WEIGHTS", MATH_PREC=graph.FLOAT, EQ_BIAS="of_1", **tensors)

    def _norm(self, graph: Graph) -> None:
        normal = graph.tensor("y", intermediate=True)
        tensors = {"MEAN": "v1", "INV_VARIANCE": "v2", "SCALE": "gamma", "BIAS": "beta"}
        tensors |= {"INPUT_RUNNING_MEAN": "v3", "INPUT_RUNNING_VAR": "v4"}
        tensors |= {"OUTPUT_RUNNING_MEAN": "v5", "OUTPUT_RUNNING_VAR": "v6"}
        tensors |= {"EPSILON": "epsilon", "EXP_AVG_FACTOR": "momentum"}
        graph.add(
            "NORM_FORWARD",
            MODE=("NORM_MODE", "CUDNN_BATCH_NORM"),
            PHASE=("NORM_FWD_PHASE", "CUDNN_NORM_FWD_TRAINING"),
            XDESC="y",
            YDESC=normal,
            **{f"{role}_DESC": name for role, name in tensors.items()},
        )
        graph.pointwise("RELU_FWD", normal, None, "y", out="out")

    def _sums(self, graph: Graph) -> None:
        graph.convolution("FORWARD", X="x", W="w", Y="out")
        graph.sum("out", "sum")
        graph.sum(graph.pointwise("MUL", "out", "out", "out"), "squares")

    def _dsums(self, graph: Graph) -> None:
        dx = graph.tensor("before", intermediate=True)
        graph.convolution("BACKWARD_DATA", DY="dy", W="w", DX=dx)
        normal = graph.normalized("before", "scale32", "bias32")
        graph.pointwise("RELU_BWD", dx, normal, "before", out="out_x")
        graph.sum("out_x", "dbias")
        graph.sum(graph.pointwise("MUL", "out_x", "before", "before"), "dscale")

    def variants(self, graphs: dict[str, Run]) -> dict[str, Run]:
        """Functions of a set's number, by name and pass; a missing graph fails in its variant."""

        def of(number: int, names: str) -> list[Tensor]:
            return [self.sets[number % SETS][name] for name in names.split()]

        def convolution(i: int) -> Tensor:
            return torch.conv2d(*of(i, "x w"), padding=1)

        def write_convolution(i: int) -> None:
            how = ([1, 1], [1, 1], [1, 1], 1, True, False, True)
            x, w, y = of(i, "x w y")
            torch.ops.aten.cudnn_convolution.out(x, w, *how, out=y)

        def all_gradients(i: int) -> None:
            gradients(*of(i, "dy x w"), data=True)

        def normal_backward(i: int) -> None:
            norm_relu_backward(*of(i, "dz z y mean inverse gamma"))

        def summed(i: int, graph: str, *, normalize: bool) -> None:
            graphs[graph](i)
            scale, bias, *_ = finalize(*of(i, "sum squares gamma beta running out"))
            if normalize:
                apply_relu(*of(i, "out"), scale, bias)

        def backward(i: int, names: list[str], *, weights: bool) -> None:
            if self.last:
                normal_backward(i)
            elif weights:
                gradient_of_sums(*of(i, "g y mean inverse gamma sum squares"))
            else:
                apply_gradient(*of(i, "g y mean inverse gamma"))
            if self.first or weights:
                gradients(*of(i, "dy x w"), data=self.first)
            for name in [] if self.first else names:
                graphs[name](i)

        made: dict[str, Run] = {
            "reference forward": lambda i: norm_relu(convolution(i), *of(i, "gamma beta running")),
            "reference backward": lambda i: (normal_backward(i), all_gradients(i)),
            "convolution forward": convolution,
            "convolution backward": all_gradients,
            "weights backward": lambda i: gradients(*of(i, "dy x w"), data=False),
        }
        if self.dtype == torch.float16:
            made["fused forward"] = lambda i: summed(i, "stats", normalize=self.last)
            made["fused backward"] = lambda i: backward(i, ["wgrad", "dgrad"], weights=False)
        else:
            made["norm forward"] = lambda i: (write_convolution(i), graphs["norm"](i))
            made["norm_relu alone"] = lambda i: norm_relu(*of(i, "y gamma beta running"))
            made["sums forward"] = lambda i: summed(i, "sums", normalize=True)
            made["sums backward"] = lambda i: backward(i, ["dsums"], weights=True)
        return made | {f"{name} alone": run for name, run in graphs.items()}

    def deviations(self, name: str) -> dict[str, float]:
        """Relative deviations of a graph's outputs in the first set from torch's."""
        t = self.sets[0]
        y, before = t["y"].float(), t["before"].float()
        sums = {"out": y, "sum": y.sum(AXES), "squares": (y * y).sum(AXES)}
        expected = {"stats": sums, "sums": sums, "norm": {"out": t["z"]}}
        if not self.first:
            dx, dw, *_ = gradients(t["dy"], t["x"], t["w"], data=True)
            g = torch.where(t["x"] > 0, dx, 0).float()
            unit = (before - spread(t["before_mean"])) * spread(t["before_inverse"])
            ends = {"out_x": g, "dbias": g.sum(AXES)}
            expected["wgrad"] = {"out_w": dw}
            expected["dgrad"] = ends | {"dscale": (g * unit).sum(AXES)}
            expected["dsums"] = ends | {"dscale": (g * before).sum(AXES)}
        return {
            output: float((t[output].float() - value.float()).norm() / value.float().norm())
            for output, value in expected[name].items()
        }


def elapsed_us(run: Callable[[], Any]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return 1e3 * start.elapsed_time(end)


def fastest(graph: Graph) -> Run:
    """The fastest plan of those that run."""
    timed: list[tuple[float, Run]] = []
    error = RuntimeError("no plan")
    for run in graph.runners():
        try:
            run(0)
            timed.append((elapsed_us(lambda run=run: [run(i) for i in range(12)]), run))
        except RuntimeError as failed:
            error = failed
    if not timed:
        raise error
    return min(timed, key=lambda pair: pair[0])[1]


def captured(run: Run) -> torch.cuda.CUDAGraph:
    for number in range(SETS):
        run(number)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(CALLS):
            run(number)
    graph.replay()
    return graph


def measure(layer: Layer) -> Results:
    """Times of a layer's variants, timed in rounds; an error instead for those that fail."""
    results: Results = {}
    graphs: dict[str, Run] = {}
    for name, future in layer.futures.items():
        try:
            run = fastest(future.result())
            run(0)
            results[f"{name} deviation"] = layer.deviations(name)
            graphs[name] = run
        except Exception as error:
            results[f"{name} deviation"] = {"error": f"{type(error).__name__}: {error}"}
    replays = {}
    for name, run in layer.variants(graphs).items():
        try:
            replays[name] = captured(run).replay
        except Exception as error:
            results[name] = {"error": f"{type(error).__name__}: {error}"[:400]}
    times: dict[str, list[float]] = {name: [] for name in replays}
    for _ in range(ROUNDS):
        for name in random.sample(list(replays), len(replays)):
            times[name].append(elapsed_us(replays[name]) / CALLS)
    for name, values in times.items():
        low, median, high = statistics.quantiles(values, n=4)
        results[name] = {"us": median, "low": low, "high": high}
    return results


def table(results: Results) -> str:
    lines = []
    for variant, found in results.items():
        text = ", ".join(f"{key} {value:.1e}" for key, value in found.items() if key != "error")
        if "us" in found:
            text = f"{found['us']:7.1f} us ({found['low']:.1f}-{found['high']:.1f})"
            if reference := results.get(f"reference {variant.split()[1]}", {}).get("us"):
                text += f" {found['us'] / reference:.3f} of reference"
        text = found.get("error", text)
        lines.append(f"    {variant:20} {text}")
    return "\n".join(lines)


def summary(results: dict[str, dict[str, Results]]) -> list[str]:
    """Sums over the layers measured in both precisions; a failed pass counts as its reference."""
    passes = [(n, p) for n in results["bfloat16"] for p in ("forward", "backward")]

    def us(dtype: str, name: str, variant: str) -> float | None:
        value: float | None = results[dtype][name].get(variant, {}).get("us")
        return value

    def reference(dtype: str, name: str, part: str) -> float:
        return us(dtype, name, f"reference {part}") or float("nan")

    lines = []
    for way, dtype in WAYS.items():
        best = sum(us(dtype, n, f"{way} {p}") or reference(dtype, n, p) for n, p in passes)
        measured = sum(us(dtype, n, f"{way} {p}") is not None for n, p in passes)
        for against in sorted({dtype, "bfloat16"}):
            total = sum(reference(against, n, p) for n, p in passes)
            lines.append(
                f"{way} ({measured} of {len(passes)} passes): {best:.0f} us, {against} reference "
                f"{total:.0f} us, saved {total - best:.0f} us: {1 - best / max(total, 1):.1%}, "
                f"or {(total - best) / STEP_US:.1%} of a step of {STEP_US:.0f} us"
            )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--tuned", action="store_true")
    asked = parser.parse_args()
    end = time.monotonic() + asked.seconds
    torch.backends.cudnn.benchmark = True
    torch._dynamo.config.recompile_limit = 64
    for option, value in TUNING_OPTIONS.items() if asked.tuned else ():
        setattr(torch._inductor.config, option, value)
    cudnn = CuDNN()
    versions = [torch.cuda.get_device_name(), torch.__version__, torch.backends.cudnn.version()]
    print(*versions, flush=True)
    results: dict[str, dict[str, Results]] = {"float16": {}, "bfloat16": {}}
    for stage, dtype in itertools.product(range(3), results):
        if time.monotonic() > end:
            print(f"no time for stage {stage + 1} in {dtype}")
            continue
        layers = [Layer(stage, position, getattr(torch, dtype)) for position in range(3)]
        with ThreadPoolExecutor(8) as pool:
            for layer in layers:
                layer.futures = {n: pool.submit(f) for n, f in layer.graphs(cudnn).items()}
                layer.variants({})["reference backward"](0)
        for layer in layers:
            results[dtype][layer.name] = found = measure(layer)
            print(f"{layer.name} {dtype}\n{table(found)}", flush=True)
        asked.out.write_text(json.dumps({"versions": versions, "results": results}))
    print(*summary(results), sep="\n")


if __name__ == "__main__":
    main()
