"""Shapes that kernels take, for callers that only ask: no kernel is imported for it."""

from __future__ import annotations

from . import formats

#: Sizes of a head that the kernels of a KV cache take.
HEAD_DIMS = tuple(range(32, 513, 16))

#: Sizes of a row of latent pages: keys whose first elements are the values, too.
LATENT_DIMS = tuple(range(32, 577, 32))

#: Largest size of a head, and of its values, in a prompt's attention by tensor cores: by floats of
#: so many parts. The 99 KB of shared memory that a block has everywhere hold no more.
MAX_PROMPT_DIMS = {1: 256, 2: 256, 3: 192}

#: Pages that pieces of prompts attend to by tensor cores, and the parts of their queries.
PIECE_DTYPES, PIECE_PARTS = ("bf16", "f16"), 2

#: Other pages: how many parts of bf16 they become for it.
PIECE_KEY_PARTS = {"f32": 2, "int8": 2, "fp8": 1}

#: Values of quantized activations that share a scale.
GROUP = 32

#: f16 activations: values that share a scale.
SUPER_BLOCK = 256

#: f16 rows that share a scale: the longest one, of which a block of threads holds 32 values each.
MAX_F16_ROW = 32768

#: Rows of activations that a mat-vec takes; above, tensor cores are the better way.
MAX_ROWS = 8

#: Matrices that a mat-vec multiplies by the same activations.
MAX_MATRICES = 4

#: Columns that a tensor-core product takes a multiple of: two f16 scales, as copies take 4 bytes at
#: least.
GEMM_COLUMNS = 64

#: Experts, and a token's choices of them, that a warp routes.
MAX_ROUTED_EXPERTS, MAX_ROUTED = 512, 32


def router_takes(rows: int, columns: int, m: object) -> bool:
    """True if a router's kernel multiplies so few float32 weights by m rows of activations."""
    few = isinstance(m, int) and m <= MAX_ROWS  # a symbol may be many
    return few and rows <= MAX_ROUTED_EXPERTS and columns % 4 == 0


def gemm_takes(format: str, columns: int) -> bool:
    """True if a tensor-core product takes rows of so many weights of the format."""
    layout = formats.get(format)
    aligned = columns > 0 and columns % max(GEMM_COLUMNS, layout.block_size) == 0
    return aligned and layout.int8_tile is not None


def gated_delta_takes(key_dim: int, value_dim: int) -> bool:
    """True if the gated delta net's kernels take heads of these sizes."""
    keys = key_dim <= 256 and key_dim % (8 if key_dim <= 128 else 16) == 0
    return keys and value_dim <= 256 and value_dim % 16 == 0


def causal_attention_takes(head_dim: int, value_dim: int, parts: int) -> bool:
    """True if a prompt's attention by tensor cores takes heads and values of these sizes."""
    most = MAX_PROMPT_DIMS[parts]
    return all(0 < dim <= most and dim % 16 == 0 for dim in (head_dim, value_dim))
