"""Hand-written PTX for the simulator's tests."""

from __future__ import annotations

import numpy as np

from ptx_kernels import simulator

DECLARATIONS = """
  .reg .pred %p<8>; .reg .b16 %h<8>; .reg .b32 %r<32>; .reg .b64 %rd<16>; .reg .f32 %f<16>;
"""


def module(
    body: str, params: str = "a, b, y", *, version: str = "7.0", target: int = 80, outside: str = ""
) -> str:
    """A kernel `k` that loads its pointer parameters into %rd0, %rd1, ...

    %r0 is the thread's number in the grid.
    """
    names = [p.strip() for p in params.split(",")]
    loads = "\n".join(f"  ld.param.u64 %rd{i}, [{name}];" for i, name in enumerate(names))
    return f""".version {version}
.target sm_{target}
.address_size 64
{outside}
.visible .entry k({", ".join(f".param .u64 {n}" for n in names)}) {{
{DECLARATIONS}{loads}
  mov.u32 %r0, %ctaid.x; mov.u32 %r1, %ntid.x; mov.u32 %r2, %tid.x;
  mad.lo.u32 %r0, %r0, %r1, %r2;
{body}
}}
"""


def store_u32(register: str, pointer: str = "%rd0") -> str:
    """Stores pointer[thread] = register."""
    return (
        f"mul.wide.u32 %rd14, %r0, 4; add.u64 %rd15, {pointer}, %rd14; "
        f"st.global.b32 [%rd15], {register};"
    )


def per_thread(
    body: str,
    result: str,
    threads: int = 32,
    blocks: int = 1,
    dtype: type = np.uint32,
    **options: object,
) -> np.ndarray:
    """Returns the final 32-bit register `result` of each thread, shape (blocks * threads,)."""
    y = np.zeros(blocks * threads, dtype)
    simulator.launch(
        module(f"{body}\n  {store_u32(result)}\n  ret;", "y"), [y], (blocks,), (threads,), **options
    )
    return y


def apply(opcode: str, classes: str, *operands: np.ndarray) -> np.ndarray:
    """Runs one instruction on arrays.

    classes: register prefix of the result and of each operand, as "r r r rd".

    Arrays and the result pass through memory with the size of their registers (h 2, r and f 4, rd 8
    bytes).
    """
    memory = {
        "h": ("b16", np.uint16),
        "r": ("b32", np.uint32),
        "f": ("f32", np.float32),
        "rd": ("b64", np.uint64),
    }
    kinds = classes.split()
    count = operands[0].size
    if count % 32:
        raise ValueError(f"{count} values are no whole number of warps")
    names = [f"x{i}" for i in range(len(operands))]
    lines = []
    for i, kind in enumerate(kinds[1:]):
        type_, dtype = memory[kind]
        lines.append(
            f"mul.wide.u32 %rd14, %r0, {np.dtype(dtype).itemsize}; add.u64 %rd15, %rd{i}, %rd14;"
            f"ld.global.{type_} %{kind}{i + 6}, [%rd15];"
        )
    result, out = ("r3", np.uint32) if kinds[0] == "p" else (f"{kinds[0]}3", memory[kinds[0]][1])
    target = "%p0" if kinds[0] == "p" else f"%{result}"
    lines.append(
        f"{opcode} {target}, {', '.join(f'%{kind}{i + 6}' for i, kind in enumerate(kinds[1:]))};"
    )
    if kinds[0] == "p":
        lines.append("selp.b32 %r3, 1, 0, %p0;")
    lines.append(
        f"mul.wide.u32 %rd14, %r0, {np.dtype(out).itemsize}; add.u64 %rd15, %rd{len(names)}, %rd14;"
        f"st.global.b{8 * np.dtype(out).itemsize} [%rd15], %{result}; ret;"
    )
    y = np.zeros(count, out)
    inputs = [
        np.array(o).view(memory[kind][1]) for o, kind in zip(operands, kinds[1:], strict=True)
    ]
    simulator.launch(
        module("\n".join(lines), ", ".join([*names, "y"])), [*inputs, y], (count // 32,), (32,)
    )
    return y


REVERSE = """
  .shared .align 16 .b8 tile[512];
  mov.u32 %r3, tile; mad.lo.u32 %r4, %r2, 4, %r3;
  st.shared.b32 [%r4], %r0;
  bar.sync 0;
  sub.u32 %r5, 127, %r2; mad.lo.u32 %r6, %r5, 4, %r3;
  ld.shared.b32 %r7, [%r6];"""
