"""Stacked layers of quantized weights in Flax: made by `nnx.vmap`, run and trained in `nnx.scan`.

python examples/nnx_scan.py

Trains the float parameters, saves the state with orbax, and restores it without building a model.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from flax import nnx

import jax_q4k as jq
from jax_q4k import models

LAYERS, SIZE, STEPS = 4, 256, 30


class Layer(nnx.Module):
    """x + scale * tanh(rms_norm(x) @ W.T), with W (SIZE, SIZE) in 4.5 bits a weight."""

    def __init__(self, rngs: nnx.Rngs):
        w = rngs.params.normal((SIZE, SIZE)) / SIZE**0.5
        self.weight = models.Packed(jq.quantize(w, "Q4_K"))  # no gradient, no optimizer state
        self.norm = nnx.Param(jnp.ones(SIZE))
        self.scale = nnx.Param(jnp.zeros(SIZE))

    def __call__(self, x: jax.Array) -> jax.Array:
        y = jq.rms_norm_matmul(x, self.norm, self.weight, eps=1e-6)
        return x + self.scale * jnp.tanh(y)


class Network(nnx.Module):
    """Layers of one stack: weights (LAYERS, SIZE, SIZE), of which one layer is compiled."""

    def __init__(self, rngs: nnx.Rngs):
        self.layers = nnx.vmap(Layer)(rngs.split(LAYERS))

    def __call__(self, x: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def through(x: jax.Array, layer: Layer) -> jax.Array:
            return layer(x)

        return through(x, self.layers)


def loss(network: Network, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((network(x) - y) ** 2)


@nnx.jit
def train_step(network: Network, optimizer: nnx.Optimizer, x: jax.Array, y: jax.Array) -> jax.Array:
    value, gradient = nnx.value_and_grad(loss)(network, x, y)
    optimizer.update(network, gradient)
    return value


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    x = jax.random.normal(jax.random.key(0), (64, SIZE))
    teacher, network = Network(nnx.Rngs(0)), Network(nnx.Rngs(0))
    teacher.layers.scale.set_value(jnp.full((LAYERS, SIZE), 0.3))
    y = teacher(x)
    print("weights:", network.layers.weight.get_value())
    optimizer = nnx.Optimizer(network, optax.adam(3e-2), wrt=nnx.Param)
    losses = [float(train_step(network, optimizer, x, y)) for _ in range(STEPS)]
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")

    graph, target = nnx.split(nnx.eval_shape(lambda: Network(nnx.Rngs(0))))
    with tempfile.TemporaryDirectory() as folder, ocp.StandardCheckpointer() as checkpointer:
        path = Path(folder) / "state"
        checkpointer.save(path, nnx.state(network))
        checkpointer.wait_until_finished()
        restored = nnx.merge(graph, checkpointer.restore(path, target))
    print(f"loss of the restored network: {float(loss(restored, x, y)):.4f}")


if __name__ == "__main__":
    main()
