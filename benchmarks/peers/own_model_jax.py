"""GPT-2 124M in JAX on one device: bf16 compute, fp32 parameters, jitted scan over steps.

The model and its sizes are those of transformers' GPT2LMHeadModel without dropout. A call is ``scan``
steps (a field, 10 by default), so that turns are multiples of it.
"""

from __future__ import annotations

import os
from typing import Any

os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]

import jax
import jax.numpy as jnp
import numpy as np
from jax_arm import Last, peak_memory_bytes
from job import Job, run
from turns import Turns

VOCABULARY, LENGTH, WIDTH, HEADS, LAYERS = 50257, 1024, 768, 12, 12
TRAINED_LENGTH = 512
RATE, DECAY, BETA1, BETA2, EPSILON = 3e-4, 0.01, 0.9, 0.999, 1e-8
Tree = Any


def initial_parameters(key: Any) -> Tree:
    keys = iter(jax.random.split(key, 6))

    def normal(*shape: int) -> Any:
        return 0.02 * jax.random.normal(next(keys), shape, jnp.float32)

    def layers(*shape: int) -> Any:
        return {"w": normal(LAYERS, *shape), "b": jnp.zeros((LAYERS, shape[-1]))}

    norm = {"scale": jnp.ones((LAYERS, WIDTH)), "shift": jnp.zeros((LAYERS, WIDTH))}
    return {
        "tokens": normal(VOCABULARY, WIDTH),
        "positions": normal(LENGTH, WIDTH),
        "blocks": {
            "norm1": norm,
            "qkv": layers(WIDTH, 3 * WIDTH),
            "out": layers(WIDTH, WIDTH),
            "norm2": norm,
            "up": layers(WIDTH, 4 * WIDTH),
            "down": layers(4 * WIDTH, WIDTH),
        },
        "norm": {"scale": jnp.ones(WIDTH), "shift": jnp.zeros(WIDTH)},
    }


def normalize(x: Any, norm: Tree) -> Any:
    x = x.astype(jnp.float32)
    centred = x - x.mean(-1, keepdims=True)
    scaled = centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    return (scaled * norm["scale"] + norm["shift"]).astype(jnp.bfloat16)


def dense(x: Any, layer: Tree) -> Any:
    return x @ layer["w"].astype(jnp.bfloat16) + layer["b"].astype(jnp.bfloat16)


def loss_of(parameters: Tree, ids: Any) -> Any:
    """Return the mean cross entropy of the next tokens of ids int32 [n, length]."""

    def block(x: Any, layer: Tree) -> tuple[Any, None]:
        qkv = dense(normalize(x, layer["norm1"]), layer["qkv"])
        q, k, v = (
            part.reshape(*ids.shape, HEADS, WIDTH // HEADS) for part in jnp.split(qkv, 3, axis=-1)
        )
        how = "cudnn" if jax.default_backend() == "gpu" else None
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=how)
        x = x + dense(attended.reshape(*ids.shape, WIDTH), layer["out"])
        hidden = jax.nn.gelu(dense(normalize(x, layer["norm2"]), layer["up"]))
        return x + dense(hidden, layer["down"]), None

    tokens = parameters["tokens"].astype(jnp.bfloat16)
    positions = parameters["positions"][: ids.shape[1]].astype(jnp.bfloat16)
    x, _ = jax.lax.scan(block, tokens[ids] + positions, parameters["blocks"], unroll=LAYERS)
    logits = (normalize(x, parameters["norm"]) @ tokens.T).astype(jnp.float32)
    chosen = jnp.take_along_axis(logits[:, :-1], ids[:, 1:, None], -1)[..., 0]
    return (jax.nn.logsumexp(logits[:, :-1], -1) - chosen).mean()


def step(state: tuple[Tree, Tree, Tree, Any], ids: Any) -> tuple[Any, Any]:
    """Return the state after one step of AdamW, and its loss."""
    parameters, first, second, count = state
    loss, gradients = jax.value_and_grad(loss_of)(parameters, ids)
    count = count + 1
    first = jax.tree.map(lambda m, g: BETA1 * m + (1 - BETA1) * g, first, gradients)
    second = jax.tree.map(lambda v, g: BETA2 * v + (1 - BETA2) * g * g, second, gradients)
    corrected = 1 - BETA1**count, 1 - BETA2**count

    def update(p: Any, m: Any, v: Any) -> Any:
        move = m / corrected[0] / (jnp.sqrt(v / corrected[1]) + EPSILON)
        return p * (1 - RATE * DECAY) - RATE * move

    return (jax.tree.map(update, parameters, first, second), first, second, count), loss


def main(job: Job) -> None:
    scan = job.numbers(scan=10)["scan"]
    parameters = jax.jit(initial_parameters)(jax.random.PRNGKey(0))
    zeros = jax.tree.map(jnp.zeros_like, parameters)
    state = parameters, zeros, jax.tree.map(jnp.copy, zeros), jnp.zeros(())
    steps = jax.jit(lambda state, ids: jax.lax.scan(step, state, ids), donate_argnums=0)
    draw = np.random.default_rng(0)
    shape = scan, job.share, TRAINED_LENGTH
    batches = jax.device_put(draw.integers(VOCABULARY, size=shape, dtype=np.int32))
    losses = jnp.zeros(1)
    turns = Turns(
        job.channel,
        job.batch,
        fence=lambda: losses.block_until_ready(),
        peak_memory_bytes=peak_memory_bytes,
        warmup=2 * scan,
    )
    while True:
        state, losses = steps(state, batches)
        turns.step(Last(losses), scan)


if __name__ == "__main__":
    run(main)
