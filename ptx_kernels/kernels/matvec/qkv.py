"""Attention projections (q, k, v) as one mat-vec launch of several matrices."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from ...limits import MAX_MATRICES
from ...ptx import Builder, KernelError, kernel
from .config import MatvecConfig
from .epilogue import Epilogue
from .matvec import product
from .prologue import InputRows, Prologue
from .rows import Matrix, launch, matrix

SUFFIXES = ("_q", "_k", "_v", "_g")
assert len(SUFFIXES) == MAX_MATRICES


@kernel
def qkv_matvec(
    k: Builder,
    *,
    formats: tuple[str, ...],
    rows: tuple[int, ...],
    x: InputRows,
    biases: bool = False,
    layers: int = 0,
    config: MatvecConfig,
) -> None:
    """Kernel: y_i[j, r] = w_i[r] . x[j] + bias_i[r] for two to four packed matrices w_i.

    Matrix i is (rows[i], columns). Thread blocks are partitioned over the matrices, in order;
    formats may differ. Operands: the planes of each matrix, activations as in `matvec`, each bias.
    Results: each y.
    """
    if not (len(formats) == len(rows) and 2 <= len(rows) <= MAX_MATRICES):
        raise KernelError(f"formats={formats} and rows={rows} must be 2 to {MAX_MATRICES} matrices")
    for format, n in zip(formats, rows, strict=True):
        config.check(format, n, x.columns, x.m)
    k.name = f"qkv_matvec_{'_'.join(dict.fromkeys(f.lower() for f in formats))}_m{x.m}"
    parts = [
        matrix(k, f, n, x.columns, prefix=f"w{s[1:]}_", layers=layers, streamed=config.streamed)
        for f, n, s in zip(formats, rows, SUFFIXES, strict=False)
    ]
    prologue = Prologue(k, x, config)
    epilogues = [
        Epilogue(k, n, x.m, config, bias=biases, suffix=s)
        for n, s in zip(rows, SUFFIXES, strict=False)
    ]
    joined(k, config, parts, prologue, epilogues)


def joined(
    k: Builder,
    config: MatvecConfig,
    parts: Sequence[Matrix],
    prologue: Prologue,
    epilogues: Sequence[Epilogue],
) -> None:
    """Emits the mat-vecs of all matrices, each with its own thread blocks."""
    counts = launch(k, config, *(each.rows for each in parts))
    if not config.ahead:
        prologue.stage()
    start, done = 0, k.label()
    for weights, epilogue, count in zip(parts, epilogues, counts, strict=True):
        end = start + count
        with k.when(k.block_id() < end) if weights is not parts[-1] else contextlib.nullcontext():
            product(k, [weights], prologue, epilogue, count, k.block_id() - start)
            if weights is not parts[-1]:
                k.jump(done)
        start = end
    k.mark(done)
