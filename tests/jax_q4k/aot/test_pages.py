"""Quantized pages in a donated loop, compiled for an H200: in-place updates for every dtype."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import jax_q4k as jq
from jax_q4k.models import CUDA_COMPILER_OPTIONS
from tools import aot
from tools.thunks import Array

pytestmark = pytest.mark.skipif(aot.unavailable() is not None, reason=str(aot.unavailable()))

PAGES, HEADS, SIZE, DIM, STEPS = 64, 2, 16, 128, 1024


@pytest.mark.parametrize("dtype, name", [(jnp.int8, "s8"), (jnp.float8_e4m3fn, "f8e4m3fn")])
def test_a_loop_of_appending_and_attending_copies_no_page(dtype, name):
    def loop(q, tables, pages, scales):
        def step(t, carry):
            q, pages, scales = carry
            named = dict(zip(("k_scales", "v_scales"), scales, strict=False))
            new = q[:, :HEADS]
            updated = jq.append_kv(*pages, new, new, t[None], **named)
            pages, scales = updated[:2], updated[2:]
            named = dict(zip(("k_scales", "v_scales"), scales, strict=False))
            return jq.paged_attention(q, *pages, tables, t[None] + 1, **named), pages, scales

        return jax.lax.fori_loop(0, STEPS, step, (q, pages, scales))

    def aval(*shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype)

    pages = (aval(PAGES, HEADS, SIZE, DIM, dtype=dtype),) * 2
    scales = (aval(PAGES, HEADS, SIZE),) * 2 if dtype == jnp.int8 else ()
    program = aot.compile_program(
        jax.jit(loop, donate_argnums=(2, 3)),
        aval(1, 4 * HEADS, DIM),
        aval(1, PAGES, dtype=jnp.int32),
        pages,
        scales,
        options=CUDA_COMPILER_OPTIONS,
    )
    assert [t.name for t in program.ptx_launches] == ["append_kv", "paged_attention"]
    assert program.rewrites(Array(name, (PAGES, HEADS, SIZE, DIM))) == []
    assert program.rewrites(Array("f32", (PAGES, HEADS, SIZE))) == []
