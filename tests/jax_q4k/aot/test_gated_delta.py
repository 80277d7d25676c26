"""Operations of the gated delta net in donated loops, compiled for an H200: in-place states."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import jax_q4k as jq
from jax_q4k.models import CUDA_COMPILER_OPTIONS
from tools import aot
from tools.thunks import Array

pytestmark = pytest.mark.skipif(aot.unavailable() is not None, reason=str(aot.unavailable()))

BATCH, K_HEADS, V_HEADS, DIM, WIDTH, STEPS = 3, 2, 4, 128, 4, 512
CHANNELS, VALUES = (2 * K_HEADS + V_HEADS) * DIM, V_HEADS * DIM
STATE, COLUMNS = (BATCH, V_HEADS, DIM, DIM), (BATCH, WIDTH, CHANNELS)


def aval(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def test_a_loop_of_steps_copies_neither_state_nor_columns():
    def loop(qkv, z, gates, columns, state, conv_weight, constants, norm_weight):
        def step(t, carry):
            y, columns, state = carry
            y, columns, state = jq.gated_delta_step(
                *(qkv, z + y, gates, gates, columns, state, jnp.full(BATCH, t)),
                conv_weight=conv_weight,
                dt_bias=constants,
                decay=-constants,
                norm_weight=norm_weight,
                eps=1e-6,
                tiled=True,
            )
            return y, columns, state

        return jax.lax.fori_loop(0, STEPS, step, (z, columns, state))

    program = aot.compile_program(
        jax.jit(loop, donate_argnums=(3, 4)),
        *(aval(BATCH, CHANNELS), aval(BATCH, VALUES), aval(BATCH, V_HEADS)),
        *(aval(*COLUMNS), aval(*STATE), aval(CHANNELS, WIDTH), aval(V_HEADS), aval(DIM)),
        options=CUDA_COMPILER_OPTIONS,
    )
    assert [t.name for t in program.ptx_launches] == ["gated_delta_step"]
    assert program.rewrites(Array("f32", STATE)) == []
    assert program.rewrites(Array("f32", COLUMNS)) == []


def test_layers_of_a_prompt_copy_no_state():
    def layers(k, v, gates, state):
        def layer(_, carry):
            return jq.gated_delta_rule(k, k, carry[0], -gates, gates, carry[1])

        return jax.lax.fori_loop(0, STEPS, layer, (v, state))

    program = aot.compile_program(
        jax.jit(layers, donate_argnums=3),
        *(aval(BATCH, 40, K_HEADS, DIM), aval(BATCH, 40, V_HEADS, DIM), aval(BATCH, 40, V_HEADS)),
        aval(*STATE),
        options=CUDA_COMPILER_OPTIONS,
    )
    assert [t.name for t in program.ptx_launches] == ["gated_delta_rule"]
    assert program.rewrites(Array("f32", STATE)) == []
