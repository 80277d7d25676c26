"""Export with a symbolic number of rows: works for all operations on a CPU, for none on CUDA."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from support.implementations import NATIVE

import jax_q4k as jq

from .ops.random_weights import random_weights

(B,) = export.symbolic_shape("b")
W, SHORT = random_weights("Q4_K", 256, 256), random_weights("Q8_0", 64, 32)
KEYS = random_weights("Q6_K", 64, 256)  # two heads
EXPERTS = jax.tree.map(lambda plane: jnp.stack([plane] * 3), W)
FLOATS, NORM = jnp.ones((24, 256), jnp.float32), jnp.ones(256, jnp.float32)


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


ROWS, IDS = array(B, 256), array(B, dtype=jnp.int32)
PAGES = array(4, 2, 16, 32)
ATTENTION = array(B, 8, 32), PAGES, array(B, 1, dtype=jnp.int32), IDS
DELTA = {"conv_weight": FLOATS[:3, :96].T, "dt_bias": NORM[:4], "decay": -NORM[:4]}
DELTA |= {"norm_weight": NORM[:16], "eps": 1e-6}
CASES = {
    "matmul": (lambda x: jq.matmul(x, W), (ROWS,)),
    "matmul of more axes": (lambda x: jq.matmul(x, W), (array(B, 4, 256),)),
    "matmul of bfloat16": (lambda x: jq.matmul(x, W), (array(B, 256, dtype=jnp.bfloat16),)),
    "matmul of short rows": (lambda x: jq.matmul(x, SHORT), (array(B, 32),)),
    "matmul of q8_1": (lambda x: jq.matmul(x, W, activations="q8_1"), (ROWS,)),
    "derivative": (lambda x: jax.vjp(lambda x: jq.matmul(x, W), x)[1](x), (ROWS,)),
    "matmul of floats": (lambda x: jq.matmul(x, FLOATS), (ROWS,)),
    "rms_norm": (lambda x: jq.rms_norm(x, NORM, eps=1e-5), (ROWS,)),
    "qkv_matmul": (lambda x: jq.qkv_matmul(x, (W, W), norm_weight=NORM, eps=1e-5), (ROWS,)),
    "gated_matmul": (lambda x: jq.gated_matmul(x, W, W), (ROWS,)),
    "mlp": (lambda x: jq.mlp(x, W, W, W, norm_weight=NORM, eps=1e-5), (ROWS,)),
    "route": (lambda x: jq.route(x, 3), (ROWS,)),
    "expert_mlp": (
        lambda x, i, p: jq.expert_mlp(x, EXPERTS, EXPERTS, EXPERTS, i, p),
        (ROWS, array(B, 2, dtype=jnp.int32), array(B, 2)),
    ),
    "routed_mlp": (
        lambda x, r: jq.routed_mlp(x, r, EXPERTS, EXPERTS, EXPERTS, 1),
        (ROWS, array(B, EXPERTS.shape[0])),
    ),
    "embedding": (lambda ids: jq.embedding(ids, W), (IDS,)),
    "argmax": (jq.argmax, (ROWS,)),
    "top_k": (lambda x: jq.top_k(x, 5), (ROWS,)),
    "quantize_q8_1": (jq.quantize_q8_1, (ROWS,)),
    "rotate": (
        lambda q, c: jq.rotate(q, c, c, interleaved=False),
        (array(B, 4, 32), array(B, 8)),
    ),
    "causal_attention": (
        lambda q, k, n: jq.causal_attention(q, k, k, n),
        (array(B, 5, 4, 32), array(B, 5, 2, 32), IDS),
    ),
    "gated_delta_rule": (
        lambda k, v, g, s: jq.gated_delta_rule(k, k, v, -abs(g), g, s),
        (array(B, 5, 2, 8), array(B, 5, 4, 16), array(B, 5, 4), array(B, 4, 8, 16)),
    ),
    "gated_delta_rule in chunks": (
        lambda k, v, g, s: jq.gated_delta_rule(k, k, v, -abs(g), g, s),
        (array(B, 70, 2, 8), array(B, 70, 4, 16), array(B, 70, 4), array(B, 4, 8, 16)),
    ),
    "gated_delta_step": (
        lambda x, z, a, c, s, p: jq.gated_delta_step(*(x, z, a, a, c, s, p), **DELTA),
        (
            *(array(B, 96), array(B, 64), array(B, 4), array(B, 3, 96)),
            *(array(B, 4, 8, 16), IDS),
        ),
    ),
    "append_kv": (lambda p, k, s: jq.append_kv(p, p, k, k, s), (PAGES, array(B, 2, 32), IDS)),
    "rope_append": (
        lambda q, k, p, s, c: jq.rope_append(q, k, k, p, p, s, c, c, interleaved=False),
        (array(B, 8, 32), array(B, 2, 32), PAGES, IDS, array(B, 8)),
    ),
    "qkv_rope_append": (
        lambda x, p, s, c: jq.qkv_rope_append(x, (W, KEYS, KEYS), p, p, s, c, c, interleaved=True),
        (array(B, 256), PAGES, IDS, array(B, 8)),
    ),
    "paged_attention": (lambda q, p, t, n: jq.paged_attention(q, p, p, t, n), ATTENTION),
    "paged_attention of pieces": (
        lambda q, p, t, n: jq.paged_attention(q[:, None], p, p, t, n),
        ATTENTION,
    ),
    "paged_attention_matmul": (
        lambda q, p, t, n: jq.paged_attention_matmul(q, p, p, t, n, W),
        ATTENTION,
    ),
}
#: XLA compiles these for a GPU, for any shape.
OF_XLA = ("matmul of floats", "rotate")


def exported(name, platform):
    function, arguments = CASES[name]
    program = jax.jit(function)
    return export.export(program, platforms=[platform], disabled_checks=jq.EXPORT_CHECKS)(
        *arguments
    )


def values(aval, rows):
    """Distinct floats, or integers that are valid as an id, a page, a slot and a length."""
    shape = [size if isinstance(size, int) else rows for size in aval.shape]
    numbers = np.arange(np.prod(shape)).reshape(shape)
    return (np.cos(numbers) if jnp.issubdtype(aval.dtype, jnp.floating) else numbers % 3).astype(
        aval.dtype
    )


@pytest.mark.slow("compiles a program for each case", quick=["matmul of short rows-xla"])
@pytest.mark.grid
@pytest.mark.parametrize("implementation", ["xla", NATIVE])
@pytest.mark.parametrize("name", CASES)
def test_on_a_cpu_one_program_serves_all_numbers_of_rows(name, implementation):
    function, arguments = CASES[name]
    with jq.implementation(implementation):
        program = exported(name, "cpu")
        for rows in (3, 12):
            given = [values(aval, rows) for aval in arguments]
            got, want = program.call(*given), jax.jit(function)(*given)
            for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
                a, b = (np.asarray(y, np.float32) for y in (a, b))
                # Short rows are not quantized to q8_1 here; elsewhere their number decides it.
                tolerance = 2e-2 if name == "matmul of short rows" else 1e-5
                np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * np.abs(b).max())


@pytest.mark.parametrize("name", CASES)
def test_on_cuda_an_error_says_what_to_do(name):
    if name in OF_XLA:
        assert exported(name, "cuda").platforms == ("cuda",)
        return
    message = r"'ptx' builds kernels for one shape, and the sizes (4\*)?b are symbols: export it"
    with pytest.raises(jq.UnavailableError, match=message):
        exported(name, "cuda")
    with jq.implementation("xla"):
        assert exported(name, "cuda").platforms == ("cuda",)
