"""Hand-written PTX for tests of the executor."""

from __future__ import annotations

import numpy as np

from ptx_kernels.ptx import Buffer, Kernel
from ptx_kernels.ptx.types import Type, f32, u32
from tools.machine_code import load, run

_HEAD = """
.version 8.0
.target sm_{least}
.address_size 64
.visible .entry small(.param .u64 x, .param .u64 y){extra}
{{
  .reg .pred %p<8>; .reg .b16 %h<8>; .reg .b32 %r<40>; .reg .b64 %d<16>; .reg .f32 %f<16>;
  .shared .align 16 .b8 memory[2048];
  ld.param.u64 %d0, [x]; ld.param.u64 %d1, [y];
  cvta.to.global.u64 %d0, %d0; cvta.to.global.u64 %d1, %d1;
  mov.u32 %r0, %tid.x;
  mad.wide.u32 %d2, %r0, 4, %d0;
  mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ntid.x;
"""


def small_kernel(
    body: str,
    inputs: int,
    outputs: int,
    *,
    threads: int = 32,
    blocks: int = 1,
    type_in: Type = u32,
    type_out: Type = u32,
    cluster: int = 1,
    least: int = 75,
) -> Kernel:
    """Makes a kernel from x (inputs,) to y (outputs,) for sm_`least` and newer.

    %d0, %d1 hold their addresses, %r0 the thread and %r1 the block; %d2 is x + 4 * thread.
    """
    least = 90 if cluster > 1 else least
    extra = f"\n.explicitcluster .reqnctapercluster {cluster}, 1, 1" if cluster > 1 else ""
    text = _HEAD.format(least=least, extra=extra).replace("%ntid.x", str(threads))
    return Kernel(
        "small",
        f"{text.strip()}\n{body}\n  ret;\n}}\n",
        (Buffer("x", type_in, (inputs,), "in"), Buffer("y", type_out, (outputs,), "out")),
        (blocks, 1, 1),
        (threads, 1, 1),
        cluster=(cluster, 1, 1),
    )


def execute(kernel: Kernel, x: np.ndarray, target: str = "sm_90", **options: object) -> np.ndarray:
    return run(load(kernel, target), [x], **options).arrays[0]  # type: ignore[arg-type]


__all__ = ["execute", "f32", "small_kernel", "u32"]
