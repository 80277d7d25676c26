"""Limits on the shapes that kernels support, readable without importing the kernels."""

from __future__ import annotations

from . import formats

#: Head sizes that the KV cache kernels take.
HEAD_DIMS = tuple(range(32, 513, 16))

#: Row sizes of latent pages, whose keys begin with the values.
LATENT_DIMS = tuple(range(32, 577, 32))

#: Largest size of a head, and of its values, in tensor-core attention of prompts, keyed by the
#: number of parts that a float is split into. A larger head exceeds the 99 KB of shared memory that
#: every device has for a block.
MAX_PROMPT_DIMS = {1: 256, 2: 256, 3: 192}

#: Page dtypes that prompt chunks attend to on tensor cores, and the number of parts of their
#: queries.
PIECE_DTYPES, PIECE_PARTS = ("bf16", "f16"), 2

#: Other page dtypes -> number of bf16 parts that they are split into for that.
PIECE_KEY_PARTS = {"f32": 2, "int8": 2, "fp8": 1}

#: Group size: values of quantized activations that share a scale.
GROUP = 32

#: f16 activations: values that share a scale.
SUPER_BLOCK = 256

#: f16 rows that share a scale: the maximum length. Each thread of a block holds 32 values.
MAX_F16_ROW = 32768

#: Maximum rows of activations of a mat-vec; tensor cores are faster for more.
MAX_ROWS = 8

#: Maximum number of matrices that a mat-vec multiplies by the same activations.
MAX_MATRICES = 4

#: A tensor-core product takes a multiple of this many columns: two f16 scales, because copies take
#: at least 4 bytes.
GEMM_COLUMNS = 64

#: Maximum number of experts, and of experts per token, that a warp routes.
MAX_ROUTED_EXPERTS, MAX_ROUTED = 512, 32


def router_takes(rows: int, columns: int, m: object) -> bool:
    """Returns whether the router kernel supports float32 weights of this shape and m rows."""
    few = isinstance(m, int) and m <= MAX_ROWS  # a symbolic size may be large
    return few and rows <= MAX_ROUTED_EXPERTS and columns % 4 == 0


def gemm_takes(format: str, columns: int) -> bool:
    """Returns whether tensor-core matmuls support rows of `columns` weights of the format."""
    layout = formats.get(format)
    aligned = columns > 0 and columns % max(GEMM_COLUMNS, layout.block_size) == 0
    return aligned and layout.int8_tile is not None


def gated_delta_takes(key_dim: int, value_dim: int) -> bool:
    """Returns whether the gated delta net kernels support heads of these sizes."""
    keys = key_dim <= 256 and key_dim % (8 if key_dim <= 128 else 16) == 0
    return keys and value_dim <= 256 and value_dim % 16 == 0


def causal_attention_takes(head_dim: int, value_dim: int, parts: int) -> bool:
    """Returns whether tensor-core prompt attention supports heads and values of these sizes."""
    most = MAX_PROMPT_DIMS[parts]
    return all(0 < dim <= most and dim % 16 == 0 for dim in (head_dim, value_dim))


#: Compute capability -> PTX version of the kernels that run on such a device and newer ones.
PTX_VERSIONS = {75: (7, 0), 90: (8, 0)}
