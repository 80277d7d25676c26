"""Packed weights in an ordinary JAX program: a stack of layers under `jit` and `scan`.

python examples/primitives.py

The same program launches PTX kernels on a CUDA device and calls C++ kernels on a CPU, where the PTX
can also be simulated.
"""

from __future__ import annotations

import argparse

import jax
import jax.numpy as jnp
import numpy as np

import jax_q4k as jq

LAYERS, SIZE = 4, 512


def random_q4_k(key: jax.Array, n: int, k: int) -> jq.QuantizedArray:
    """Random Q4_K weights (n, k).

    A block of 256 weights has two float16 scales, 12 bytes of sub-block scales, and 128 bytes of
    quants.
    """
    blocks = np.array(jax.random.bits(key, (n, k // 256, 144), jnp.uint8))
    blocks[..., :4] = np.array([2e-4, 1.5e-3], np.float16).view(np.uint8)
    return jq.QuantizedArray.from_gguf_bytes(blocks, "Q4_K", (n, k))


argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
).parse_args()
keys = jax.random.split(jax.random.key(0), LAYERS + 1)
layers = [random_q4_k(key, SIZE, SIZE) for key in keys[1:]]
# A QuantizedArray is a pytree of uint8 planes: it stacks, scans and shards like any other.
stacked = jax.tree.map(lambda *planes: jnp.stack(planes), *layers)
x = jax.random.normal(keys[0], (2, SIZE))


@jax.jit
def network(x: jax.Array, weights: jq.QuantizedArray) -> jax.Array:
    def layer(x: jax.Array, w: jq.QuantizedArray) -> tuple[jax.Array, None]:
        return x + jnp.tanh(jq.matmul(x, w)), None

    return jax.lax.scan(layer, x, weights)[0]


with jq.implementation(activations="f32"):
    y = network(x, stacked)
want = x
for w in layers:
    want = want + jnp.tanh(jnp.dot(want, w.dequantize().T, precision="highest"))
print(
    f"{LAYERS} layers of {SIZE} x {SIZE}: {stacked.nbytes:,} bytes packed, "
    f"{4 * stacked.size:,} as float32"
)
print(f"largest difference from the decoded weights' result: {jnp.max(jnp.abs(y - want)):.1e}")

# The default of the GPU and CPU kernels: int8 activations in groups of 32.
with jq.implementation(activations="q8_1"):
    quantized = network(x, stacked)
error = jnp.mean((quantized - want) ** 2) / jnp.mean(want**2)
print(f"with int8 activations: normalized mean squared error {error:.1e}")
