"""Sizes of the benchmarks in `benchmarks.gpu`: a real model's shapes, or small ones to simulate."""

from __future__ import annotations

from dataclasses import dataclass

from ptx_kernels.kernels.matvec import SHAPES
from tools.spaces import FORMATS, LLAMA_8B

from .common import part_of


@dataclass(frozen=True)
class Sizes:
    """Sizes of a run.

    Attributes:
      matrices: (n, columns) of mat-vecs.
      formats: block formats of timed mat-vecs.
      rows: rows of activations of mat-vecs.
      contexts: tokens that attention reads.
      prompts: rows of activations of tensor-core products.
      hidden, kv, inner: a layer's columns, rows of its keys, rows of its gate.
      chain: empty kernels in a graph; a graph with a tenth of them measures the cost of a graph.
      barriers: cluster barriers in one kernel; one with a tenth of them measures the cost of a
        kernel.
      copy_bytes: bytes of a copy that measures the bandwidth.
    """

    matrices: tuple[tuple[int, int], ...]
    formats: tuple[str, ...]
    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    prompts: tuple[int, ...]
    hidden: int
    kv: int
    inner: int
    chain: int
    barriers: int
    copy_bytes: int


#: Llama-3.1-8B's sizes, and similar matrices.
FULL = Sizes(
    matrices=SHAPES,
    formats=FORMATS,
    rows=(1, 2, 4, 8),
    contexts=(1024, 8192, 32768),
    prompts=(16, 64, 512),
    hidden=LLAMA_8B.hidden,
    kv=LLAMA_8B.kv,
    inner=LLAMA_8B.inner,
    chain=1000,
    barriers=2000,
    copy_bytes=1 << 30,
)

#: Sizes of a dry run: the same kernels in the simulator, within seconds.
SMALL = Sizes(
    matrices=((64, 512),),
    formats=("Q4_K", "Q6_K", "Q8_0"),
    rows=(1, 4),
    contexts=(64,),
    prompts=(16, 64),
    hidden=512,
    kv=64,
    inner=1024,
    chain=20,
    barriers=20,
    copy_bytes=1 << 16,
)


if __name__ == "__main__":
    part_of("gpu", __doc__)
