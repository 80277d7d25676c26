"""Writes a GGUF file with random weights: a file of a real model's size to measure.

python -m benchmarks.random_file OUT.gguf --shape gemma3-1b
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from jax_q4k import gguf, quantizers
from jax_q4k.models.config import Config
from jax_q4k.models.config.tensors import expected_tensors
from jax_q4k.models.files.gguf import completed
from jax_q4k.models.files.quantizing import recipes
from tools.random_model import GEMMA_3_1B, LLAMA_1B, MOE_3B, QWEN_3_5_800M

#: Models, also of architectures other than llama.
SHAPES = {
    "llama-1b": LLAMA_1B,
    "gemma3-1b": GEMMA_3_1B,
    "moe-3b": MOE_3B,
    "qwen35-800m": QWEN_3_5_800M,
}

_PIECE = 1 << 21  # weights generated for each type and row length


def write(
    path: str | os.PathLike[str],
    config: Config = LLAMA_1B,
    type: str = "Q4_K_M",
    progress: Callable[[int, int], object] | None = None,
) -> None:
    """Writes normally distributed weights, quantized to `type`.

    Their scale preserves the magnitude of activations; norms are 1. Matrices hold the same rows in
    different orders.

    Embeddings are tied. The vocabulary is SentencePiece's: special tokens, bytes and made-up words.
    """
    recipe = recipes.get(type)
    shapes = {
        name: shape for name, (shape, required, *_) in expected_tensors(config).items() if required
    }
    tensors = {
        name: gguf.TensorPieces(kind, shape, functools.partial(_pieces, name, kind, shape))
        for (name, kind), shape in zip(
            recipes.tensor_types(recipe, config, shapes).items(), shapes.values(), strict=True
        )
    }
    metadata = completed(
        config.to_metadata() | _vocabulary(config.vocab_size), recipes.file_type(type)
    )
    gguf.write(path, metadata, tensors, progress=progress)


def written(shape: str) -> str:
    """Returns the path of a shape's temporary file; writes the file if it does not exist."""
    path = f"{tempfile.gettempdir()}/random-{shape}.Q4_K_M.gguf"
    if not os.path.exists(path):
        print(f"writing {path} ...")
        write(path, SHAPES[shape])
    return path


def _pieces(name: str, kind: str, shape: tuple[int, ...]) -> Iterator[np.ndarray]:
    if len(shape) == 1:  # norms; and the decay of states, which is negative
        yield np.full(shape, -1 if name.endswith("ssm_a") else 1, np.float32)
        return
    random, (*leading, k) = np.random.default_rng([*name.encode()]), shape
    rows, left = _rows(kind, k), math.prod(leading)
    while left:
        piece = rows[random.permutation(len(rows))[:left]]
        left -= len(piece)
        yield piece


@functools.cache
def _rows(kind: str, k: int) -> np.ndarray:
    """Returns rows of normally distributed weights, which all matrices reuse."""
    weights = np.random.default_rng(k).standard_normal((_PIECE // k, k), np.float32)
    weights *= np.float32(k**-0.5)
    if kind in gguf.PLAIN:
        return weights.astype(gguf.PLAIN[kind].dtype)
    return quantizers.quantize(weights, kind)


def _vocabulary(size: int) -> dict[str, Any]:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = [f"\u2581w{i}" for i in range(size - len(tokens))]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens + words,
        "tokenizer.ggml.scores": np.array(
            [0.0] * len(tokens) + [-float(i) for i in range(len(words))], np.float32
        ),
        "tokenizer.ggml.token_type": np.array([2, 3, 3] + [6] * 256 + [1] * len(words), np.int32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.random_file",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("path", metavar="OUT.gguf")
    parser.add_argument("--shape", choices=SHAPES, default="llama-1b", help="default: %(default)s")
    parser.add_argument(
        "--type", choices=recipes.RECIPES, default="Q4_K_M", help="default: %(default)s"
    )
    options = parser.parse_args(arguments)
    write(options.path, SHAPES[options.shape], options.type)
    print(f"{options.path}: {os.path.getsize(options.path):,} bytes")


if __name__ == "__main__":
    main()
