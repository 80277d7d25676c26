"""Runs a PTX kernel inside a JAX program, as an XLA custom call or in the simulator."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import jax
import jax.extend
import numpy as np
from jax.interpreters import mlir

from . import float_types, native

if TYPE_CHECKING:
    from ptx_kernels.ptx import Kernel
    from ptx_kernels.ptx.module import Buffer

#: XLA:GPU's typed-FFI target that loads PTX text and launches it as a native kernel.
TARGET = "__gpu$xla.gpu.ptx"

#: Pass this as `jax.export.export(..., disabled_checks=EXPORT_CHECKS)`: by default, export refuses
#: custom calls to targets that it does not know.
EXPORT_CHECKS: Sequence[Any] = tuple(
    map(jax.export.DisabledSafetyCheck.custom_call, (TARGET, *native.TARGETS))
)

#: PTX of kernels, in the order in which programs that launch them were traced last.
launched_texts: collections.deque[str] = collections.deque(maxlen=512)

KernelCall = Callable[..., list[jax.Array]]


def ptx_name(dtype: Any) -> str:
    """Returns the name that kernels use for a dtype.

    The dtype is float32, float16, bfloat16, int8 or float8_e4m3fn.
    """
    return float_types.of_dtype(dtype).kernel


def _jax_dtype(buffer: Buffer) -> np.dtype:
    known = float_types.of_ptx(buffer.type.name)  # NumPy itself has no bfloat16 and float8
    return buffer.type.dtype if known is None else known.dtype


def _result_avals(kernel: Kernel) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(b.shape, _jax_dtype(b)) for b in kernel.results]


def as_jax(kernel: Kernel, results: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Returns a kernel's results with JAX's dtypes; NumPy has only the bits of some."""
    return [r.view(_jax_dtype(b)) for r, b in zip(results, kernel.results, strict=True)]


def _check_operands(kernel: Kernel, operands: Sequence[Any]) -> None:
    expected = [(b.shape, _jax_dtype(b)) for b in kernel.operands]
    got = [(tuple(x.shape), np.dtype(x.dtype)) for x in operands]
    if expected != got:
        raise TypeError(f"kernel {kernel.name} takes {expected}, got {got}")


def launch_ptx(kernel: Kernel, *operands: jax.Array) -> list[jax.Array]:
    """Launches `kernel` on the GPU through XLA's PTX custom call; returns its results.

    The kernel updates `inout` buffers in place.
    """
    _check_operands(kernel, operands)
    launched_texts.append(kernel.text)
    call = jax.ffi.ffi_call(TARGET, _result_avals(kernel), input_output_aliases=kernel.aliases)
    grid, block = kernel.grid, kernel.block
    return list(
        call(
            *operands,
            name=kernel.name,
            kernel_type="ptx",
            kernel_data=kernel.text,
            grid_x=np.int32(grid[0]),
            grid_y=np.int32(grid[1]),
            grid_z=np.int32(grid[2]),
            block_x=np.int32(block[0]),
            block_y=np.int32(block[1]),
            block_z=np.int32(block[2]),
            shared_mem_bytes=np.int32(kernel.dynamic_shared_bytes),
        )
    )


def launch_simulated(kernel: Kernel, *operands: jax.Array) -> list[jax.Array]:
    """Runs `kernel`'s PTX text in the simulator, on the host; returns its results."""
    _check_operands(kernel, operands)
    return simulate_p.bind(*operands, kernel=kernel)


# A primitive, because its callback receives NumPy arrays. jax.pure_callback would first put them on
# the device, which can deadlock XLA's CPU thread pool while it waits for this very callback.
simulate_p = jax.extend.core.Primitive("simulate_ptx")
simulate_p.multiple_results = True


@simulate_p.def_abstract_eval
def _simulate_abstract_eval(*operands: Any, kernel: Kernel) -> list[jax.core.ShapedArray]:
    return [jax.core.ShapedArray(a.shape, a.dtype) for a in _result_avals(kernel)]


@functools.cache
def _simulator_thread() -> ThreadPoolExecutor:
    """Returns the single-threaded executor that runs simulated launches.

    Its thread has the floating-point environment of the thread that first lowers a launch. XLA's
    own threads flush subnormals to zero, and so would NumPy in a callback on them.
    """
    pool = ThreadPoolExecutor(1, "simulator")
    pool.submit(lambda: None).result()  # the thread starts here, not in the callback
    return pool


def _simulate_lowering(
    ctx: mlir.LoweringRuleContext, *operands: Any, kernel: Kernel
) -> Sequence[Any]:
    from ptx_kernels import simulator  # imported on first use

    thread = _simulator_thread()

    def callback(*arrays: np.ndarray) -> tuple[np.ndarray, ...]:
        results = thread.submit(simulator.run, kernel, *(np.asarray(a) for a in arrays)).result()
        return tuple(as_jax(kernel, results))

    avals_in: Any = ctx.avals_in
    avals_out: Any = ctx.avals_out
    results, _, _ = mlir.emit_python_callback(
        ctx, callback, None, list(operands), avals_in, avals_out, has_side_effect=False
    )
    return results


mlir.register_lowering(simulate_p, _simulate_lowering, platform="cpu")
