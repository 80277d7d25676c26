"""Custom calls compiled by XLA for an H200 without a GPU, with one small handwritten kernel."""

from __future__ import annotations

import dataclasses
import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding
from support.xla_executable import launch_arguments

from jax_q4k import custom_call
from jax_q4k.models import CUDA_COMPILER_OPTIONS
from ptx_kernels.ptx import Kernel
from ptx_kernels.ptx.module import Buffer
from ptx_kernels.ptx.types import f32
from tools import aot
from tools.thunks import Array

pytestmark = pytest.mark.skipif(aot.unavailable() is not None, reason=str(aot.unavailable()))

SIZE = 256
ARRAY = Array("f32", (SIZE,))
AVAL = jax.ShapeDtypeStruct((SIZE,), jnp.float32)

#: y[i] += x[i], in place
ACCUMULATE = Kernel(
    name="accumulate",
    text="""\
.version 7.0
.target sm_60
.address_size 64
.visible .entry accumulate(.param .u64 x, .param .u64 y, .param .u64 y_result)
{
  .reg .f32 %f<3>;
  .reg .b64 %rd<4>;
  .reg .b32 %r<1>;
  mov.u32 %r0, %tid.x;
  mul.wide.u32 %rd0, %r0, 4;
  ld.param.u64 %rd1, [x];
  ld.param.u64 %rd2, [y_result];
  add.u64 %rd1, %rd1, %rd0;
  add.u64 %rd2, %rd2, %rd0;
  ld.global.f32 %f0, [%rd1];
  ld.global.f32 %f1, [%rd2];
  add.rn.f32 %f2, %f0, %f1;
  st.global.f32 [%rd2], %f2;
  ret;
}
""",
    buffers=(Buffer("x", f32, (SIZE,), "in"), Buffer("y", f32, (SIZE,), "inout")),
    grid=(1, 1, 1),
    block=(SIZE, 1, 1),
)


def accumulate(x: jax.Array, y: jax.Array) -> jax.Array:
    return custom_call.launch_ptx(ACCUMULATE, x, y)[0]


def loop(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns x and y after up to 100 steps; the number is unknown at compile time."""

    def step(carry):
        i, x, y = carry
        return i + 1, jnp.sin(x), accumulate(x, y)

    return jax.lax.while_loop(lambda c: (c[0] < 100) & (c[2][0] < 10), step, (0, x, y))[1:]


def test_launch_has_the_kernels_name_grid_and_block():
    kernel = dataclasses.replace(
        ACCUMULATE, grid=(7, 5, 3), block=(32, 4, 2), dynamic_shared_bytes=48
    )
    call = jax.jit(lambda x, y: custom_call.launch_ptx(kernel, x, y)[0], donate_argnums=1)
    program = aot.compile_program(call, AVAL, AVAL)
    (launch,) = program.ptx_launches
    assert (launch.name, launch.grid, launch.block, launch.shared_bytes) == (
        "accumulate",
        (7, 5, 3),
        (32, 4, 2),
        48,
    )
    assert launch.instruction.results == (ARRAY,)


def test_parameters_are_operands_in_order_then_results_in_order():
    """Buffers of different sizes tell them apart in the executable that XLA serializes."""
    sizes = {"a": 256, "b": 1024, "c": 512, "d": 128}
    buffers = [Buffer(n, f32, (size,), "in" if n < "c" else "out") for n, size in sizes.items()]
    kernel = dataclasses.replace(ACCUMULATE, name="in_order", buffers=tuple(buffers))
    a, b = (jax.ShapeDtypeStruct((sizes[n],), jnp.float32) for n in "ab")
    found = _arguments(jax.jit(lambda a, b: custom_call.launch_ptx(kernel, a, b)), kernel, a, b)
    assert [one.size // 4 for one in found] == list(sizes.values())
    assert [one.written for one in found] == [False, False, True, True]
    assert len({one.buffer for one in found}) == 4


def test_an_updated_argument_has_one_address():
    x, y, result = _arguments(jax.jit(accumulate, donate_argnums=1), ACCUMULATE, *[AVAL] * 2)
    assert y.buffer == result.buffer != x.buffer and result.written


def _arguments(function, kernel, *avals):
    sharding = SingleDeviceSharding(aot.gpus()[0])
    given = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding) for a in avals]
    compiled = function.trace(*given).lower(lowering_platforms=("cuda",)).compile()
    return launch_arguments(compiled.runtime_executable().serialize(), kernel.name)


def test_donated_argument_is_updated_in_place():
    program = aot.compile_program(jax.jit(accumulate, donate_argnums=1), AVAL, AVAL)
    assert program.launches == program.ptx_launches
    assert program.rewrites(ARRAY) == []


def test_argument_that_is_not_donated_is_copied_and_seen():
    program = aot.compile_program(jax.jit(accumulate), AVAL, AVAL)
    (copy,) = program.rewrites(ARRAY)
    assert copy.kind == "kCopy"
    (copy,) = program.rewrites(Array("f32", (2, SIZE // 2)))  # the same bytes in another shape
    assert (
        program.rewrites(Array("f32", (SIZE + 1,))) == program.rewrites(Array("s32", (SIZE,))) == []
    )


def test_whole_loop_is_one_cuda_graph_that_updates_in_place():
    program = aot.compile_program(
        jax.jit(loop, donate_argnums=(0, 1)), AVAL, AVAL, options=CUDA_COMPILER_OPTIONS
    )
    (while_,) = program.loops
    assert while_.is_in("kCommandBuffer")
    assert len(program.ptx_launches) == 1
    assert all(t.is_in("kWhile") and t.is_in("kCommandBuffer") for t in program.ptx_launches)
    assert all(t.is_in("kCommandBuffer") for t in program.launches)
    # x = sin(x); y is not copied
    assert {t.kind for t in program.rewrites(ARRAY)} == {"kCustomKernel"}


def test_loop_without_the_options_is_driven_by_the_host():
    program = aot.compile_program(jax.jit(loop, donate_argnums=(0, 1)), AVAL, AVAL)
    (while_,) = program.loops
    assert not while_.is_in("kCommandBuffer")


def test_options_given_to_jit_are_used():
    jitted = jax.jit(loop, donate_argnums=(0, 1), compiler_options=CUDA_COMPILER_OPTIONS)
    (while_,) = aot.compile_program(jitted, AVAL, AVAL).loops
    assert while_.is_in("kCommandBuffer")


def test_equal_calls_are_merged():
    def twice(x, y):
        return jnp.sin(accumulate(x, y)) + jnp.cos(accumulate(x, y))

    assert len(aot.compile_program(jax.jit(twice), AVAL, AVAL).ptx_launches) == 1


def test_export_needs_and_takes_the_exception_for_our_target():
    jitted = jax.jit(accumulate)
    with pytest.raises(ValueError, match="custom call"):
        jax.export.export(jitted, platforms=["cuda"])(AVAL, AVAL)
    exported = jax.export.export(
        jitted, platforms=["cuda"], disabled_checks=custom_call.EXPORT_CHECKS
    )(AVAL, AVAL)
    assert f'name = "{ACCUMULATE.name}"' in exported.mlir_module()
    program = aot.compile_program(jax.jit(exported.call), AVAL, AVAL)
    assert [t.name for t in program.ptx_launches] == [ACCUMULATE.name]


#: Attributes that XLA needs, with their types in MLIR.
ATTRIBUTES = {
    **dict.fromkeys(("name", "kernel_type", "kernel_data"), str),
    **dict.fromkeys([f"{of}_{axis}" for of in ("grid", "block") for axis in "xyz"], np.int32),
    "shared_mem_bytes": np.int32,
}


def attributes(**changed):
    """Attributes of a launch as `launch_ptx` gives them to XLA, with some changed."""
    given = {}
    with mock.patch.object(
        jax.ffi, "ffi_call", lambda *_, **__: lambda *_, **a: given.update(a) or ()
    ):
        custom_call.launch_ptx(ACCUMULATE, jnp.ones(SIZE), jnp.ones(SIZE))
    return {**given, **changed}


def compiled(given):
    call = jax.ffi.ffi_call(custom_call.TARGET, [AVAL], input_output_aliases=ACCUMULATE.aliases)
    return aot.compile_program(jax.jit(lambda x, y: call(x, y, **given)), AVAL, AVAL)


def test_the_attributes_are_those_that_xla_needs():
    given = attributes()
    assert {name: type(value) for name, value in given.items()} == ATTRIBUTES
    for left_out in ATTRIBUTES:
        with pytest.raises(jax.errors.JaxRuntimeError, match=f"required field '{left_out}'"):
            compiled({name: value for name, value in given.items() if name != left_out})


@pytest.mark.parametrize(
    "changed",
    [
        {"grid_x": np.int32(0)},
        {"block_x": np.int32(2048)},
        {"shared_mem_bytes": np.int32(1 << 20)},
        {"kernel_data": "not PTX"},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_xla_compiles_launches_that_no_driver_takes(changed):
    """So `Kernel.launch`, ptxas and `ptx_kernels.driver` have to find them."""
    assert len(compiled(attributes(**changed)).ptx_launches) == 1


def test_an_operand_of_no_bytes_stays_an_operand():
    """The kernel gets a pointer for it, which may be null."""
    empty = dataclasses.replace(
        ACCUMULATE, buffers=(Buffer("x", f32, (0,), "in"), ACCUMULATE.buffers[1])
    )
    jitted = jax.jit(lambda x, y: custom_call.launch_ptx(empty, x, y)[0], donate_argnums=1)
    program = aot.compile_program(jitted, jax.ShapeDtypeStruct((0,), jnp.float32), AVAL)
    (launch,) = program.ptx_launches
    operands = re.search(rf"{re.escape(launch.instruction.name)} = [^(]*\(([^)]*)\)", program.hlo)[
        1
    ]
    assert operands.count("%") == 2


def test_a_launch_whose_only_result_has_no_bytes_is_left_out():
    nothing = dataclasses.replace(
        ACCUMULATE, buffers=(ACCUMULATE.buffers[0], Buffer("y", f32, (0,), "out"))
    )
    program = aot.compile_program(jax.jit(lambda x: custom_call.launch_ptx(nothing, x)), AVAL)
    assert program.ptx_launches == []
