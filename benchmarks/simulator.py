"""Measures the simulator's speed: `python -m benchmarks.simulator [--json FILE]`.

It reports lane-instructions per second on a wide grid (the minimum is 20 million), the same with a
divergent loop, and the cost of a small launch, of which a simulated model makes hundreds. An
instruction counts once per lane that executes it, even if all lanes hold one value and the
simulator computes it once.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from ptx_kernels import simulator
from ptx_kernels.simulator.launch import BATCH_LANES
from tools.results import write_results

_HEADER = ".version 7.0\n.target sm_61\n.address_size 64\n"

# y[warp] = sum over steps of w[warp, step, lane] . x[step, lane], four int8 at a time, 16-byte
# loads
_MATVEC = (
    _HEADER
    + """
.visible .entry matvec(.param .u64 w, .param .u64 x, .param .u64 y) {
  .reg .b32 %r<32>; .reg .b64 %rd<16>; .reg .pred %p<3>; .reg .f32 %f<4>;
  ld.param.u64 %rd0, [w]; ld.param.u64 %rd1, [x]; ld.param.u64 %rd2, [y];
  mov.u32 %r0, %tid.x; mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ntid.x;
  mad.lo.u32 %r3, %r1, %r2, %r0;
  and.b32 %r4, %r0, 31;
  shr.u32 %r5, %r3, 5;
  mul.wide.u32 %rd3, %r5, STEPS * 512;
  mul.wide.u32 %rd4, %r4, 16;
  add.u64 %rd5, %rd0, %rd3; add.u64 %rd5, %rd5, %rd4; add.u64 %rd6, %rd1, %rd4;
  mov.b32 %r6, 0; mov.b32 %r7, 0;
LOOP:
  ld.global.nc.v4.u32 {%r8, %r9, %r10, %r11}, [%rd5];
  ld.global.nc.v4.u32 {%r12, %r13, %r14, %r15}, [%rd6];
  and.b32 %r16, %r8, 0x0f0f0f0f; and.b32 %r17, %r9, 0x0f0f0f0f;
  and.b32 %r18, %r10, 0x0f0f0f0f; and.b32 %r19, %r11, 0x0f0f0f0f;
  dp4a.s32.s32 %r7, %r16, %r12, %r7; dp4a.s32.s32 %r7, %r17, %r13, %r7;
  dp4a.s32.s32 %r7, %r18, %r14, %r7; dp4a.s32.s32 %r7, %r19, %r15, %r7;
  shr.u32 %r16, %r8, 4; and.b32 %r16, %r16, 0x0f0f0f0f;
  dp4a.s32.s32 %r7, %r16, %r12, %r7;
  add.u64 %rd5, %rd5, 512; add.u64 %rd6, %rd6, 512;
  add.u32 %r6, %r6, 1;
  setp.lt.u32 %p0, %r6, STEPS;
  @%p0 bra LOOP;
  cvt.rn.f32.s32 %f0, %r7;
  REDUCE
  setp.ne.u32 %p1, %r4, 0;
  @%p1 bra END;
  mul.wide.u32 %rd7, %r5, 4; add.u64 %rd8, %rd2, %rd7;
  st.global.f32 [%rd8], %f0;
END:
  ret;
}
"""
)
_REDUCE = "\n  ".join(
    f"shfl.sync.bfly.b32 %f1, %f0, {m}, 31, -1; add.rn.f32 %f0, %f0, %f1;" for m in (16, 8, 4, 2, 1)
)

# a trip count per lane (thread % 64 rounds), so that the lanes of a warp leave the loop at
# different times
_DIVERGENT = (
    _HEADER
    + """
.visible .entry divergent(.param .u64 y) {
  .reg .b32 %r<8>; .reg .b64 %rd<4>; .reg .pred %p<2>; .reg .f32 %f<4>;
  ld.param.u64 %rd0, [y];
  mov.u32 %r0, %tid.x; mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ntid.x;
  mad.lo.u32 %r3, %r1, %r2, %r0;
  and.b32 %r4, %r3, 63;
  mov.b32 %r5, 0; mov.f32 %f0, 0f00000000; cvt.rn.f32.u32 %f1, %r4;
LOOP:
  setp.ge.u32 %p0, %r5, %r4;
  @%p0 bra END;
  fma.rn.f32 %f0, %f0, 0f3F000000, %f1;
  mul.rn.f32 %f2, %f0, %f1;
  max.f32 %f0, %f0, %f2;
  add.u32 %r5, %r5, 1;
  bra LOOP;
END:
  mul.wide.u32 %rd1, %r3, 4; add.u64 %rd2, %rd0, %rd1;
  st.global.f32 [%rd2], %f0;
  ret;
}
"""
)

Run = tuple[simulator.Statistics, float]  # and seconds


@dataclass(frozen=True)
class Result:
    name: str
    blocks: int
    lane_instructions: int
    seconds: float

    @property
    def rate(self) -> float:
        """Million lane-instructions per second."""
        return self.lane_instructions / self.seconds / 1e6


def matvec(blocks: int, steps: int, threads: int = 128, *, batch_lanes: int = BATCH_LANES) -> Run:
    """Returns (statistics, seconds) of a mat-vec of blocks * threads / 32 rows.

    Checks the result.
    """
    rng = np.random.default_rng(0)
    rows = blocks * threads // 32
    weights = rng.integers(0, 256, (rows, steps, 32, 16), np.uint8)
    x = rng.integers(-127, 128, (steps, 32, 16), np.int8)
    y = np.empty(rows, np.float32)
    text = (
        _MATVEC.replace("STEPS * 512", str(steps * 512))
        .replace("STEPS", str(steps))
        .replace("REDUCE", _REDUCE)
    )
    buffers = [
        simulator.DeviceBuffer("w", weights, "in"),
        simulator.DeviceBuffer("x", x, "in"),
        simulator.DeviceBuffer("y", y, "out", initialized=False),
    ]
    start = time.perf_counter()
    statistics_ = simulator.launch(text, buffers, (blocks,), (threads,), batch_lanes=batch_lanes)
    seconds = time.perf_counter() - start
    low = np.einsum(
        "rslb,slb->r", (weights & 15).astype(np.float64), x.astype(np.float64), optimize=True
    )
    high = np.einsum(
        "rslb,slb->r",
        (weights[..., :4] >> 4).astype(np.float64),
        x[..., :4].astype(np.float64),
        optimize=True,
    )
    assert np.array_equal(y, (low + high).astype(np.float32)), "the simulated mat-vec is wrong"
    return statistics_, seconds


def divergent(blocks: int, threads: int = 128) -> Run:
    y = np.zeros(blocks * threads, np.float32)
    start = time.perf_counter()
    statistics_ = simulator.launch(_DIVERGENT, [y], (blocks,), (threads,))
    return statistics_, time.perf_counter() - start


def median_of(name: str, blocks: int, measure: Callable[[], Run], repeats: int) -> Result:
    measure()  # parses and warms up
    runs = [measure() for _ in range(repeats)]
    return Result(
        name,
        blocks,
        runs[0][0].lane_instructions,
        statistics.median(seconds for _, seconds in runs),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    results = [
        median_of("dp4a mat-vec, wide grid", 2048, lambda: matvec(2048, 16), arguments.repeats),
        median_of(
            "lanes leave a loop one by one", 2048, lambda: divergent(2048), arguments.repeats
        ),
        median_of("small launch, 16 blocks", 16, lambda: matvec(16, 8), 4 * arguments.repeats),
        median_of("small launch, 2 blocks", 2, lambda: matvec(2, 8), 4 * arguments.repeats),
    ]
    print(f"{'case':32}{'blocks':>8}{'lane-instructions':>20}{'ms':>10}{'million/s':>12}")
    for r in results:
        print(
            f"{r.name:32}{r.blocks:8}{r.lane_instructions:20,}{r.seconds * 1e3:10.2f}{r.rate:12.1f}"
        )
    if arguments.json:
        write_results(
            arguments.json,
            {"results": [asdict(r) | {"million_per_second": r.rate} for r in results]},
        )


if __name__ == "__main__":
    main()
