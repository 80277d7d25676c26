"""A llama of random weights, as a GGUF file: something of a real model's size to measure."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from jax_q4k import gguf, quantizers
from jax_q4k.models import mixtures
from jax_q4k.models.config import Config
from jax_q4k.models.save import completed

#: 1.04 billion parameters, of Llama 3.2 1B's shape with a smaller vocabulary; tied embeddings.
CONFIG = Config(
    architecture="llama",
    num_layers=16,
    hidden_size=2048,
    intermediate_size=8192,
    num_heads=32,
    num_kv_heads=8,
    head_dim=64,
    vocab_size=32000,
    context_length=4096,
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
    rope_dim=64,
)
_PIECE = 1 << 21  # weights made at a time


def shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """GGUF's tensor names -> row-major shapes."""
    hidden, heads, kv_heads = config.hidden_size, config.num_heads, config.num_kv_heads
    found: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (config.vocab_size, hidden),
        "output_norm.weight": (hidden,),
    }
    for layer in range(config.num_layers):
        parts = {
            "attn_norm": (hidden,),
            "attn_q": (heads * config.head_dim, hidden),
            "attn_k": (kv_heads * config.head_dim, hidden),
            "attn_v": (kv_heads * config.head_dim, hidden),
            "attn_output": (hidden, heads * config.head_dim),
            "ffn_norm": (hidden,),
            "ffn_gate": (config.intermediate_size, hidden),
            "ffn_up": (config.intermediate_size, hidden),
            "ffn_down": (hidden, config.intermediate_size),
        }
        found |= {f"blk.{layer}.{part}.weight": shape for part, shape in parts.items()}
    return found


def write(
    path: str | os.PathLike[str],
    config: Config = CONFIG,
    type: str = "Q4_K_M",
    progress: Callable[[int, int], object] | None = None,
) -> None:
    """Writes normally distributed weights, quantized to `type`, as large as keeps activations' size; norms are 1."""
    mixture = mixtures.get(type)
    tensors = {
        name: gguf.TensorPieces(kind, shape, functools.partial(_pieces, name, kind, shape))
        for (name, kind), shape in zip(
            mixtures.tensor_types(mixture, config, shapes(config)).items(), shapes(config).values(), strict=True
        )
    }
    metadata = completed(config.to_metadata() | _vocabulary(config.vocab_size), mixture.file_type)
    gguf.write(path, metadata, tensors, progress=progress)


def _pieces(name: str, kind: str, shape: tuple[int, ...]) -> Iterator[np.ndarray]:
    if len(shape) == 1:
        yield np.ones(shape, np.float32)
        return
    n, k = shape
    step = _PIECE // k
    for start in range(0, n, step):
        random = np.random.default_rng([start, *name.encode()])
        rows = random.standard_normal((min(step, n - start), k), np.float32) * np.float32(k**-0.5)
        yield quantizers.quantize(rows, kind)


def _vocabulary(size: int) -> dict[str, Any]:
    """A SentencePiece vocabulary: three special tokens, all bytes, and made-up words."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = [f"\u2581w{i}" for i in range(size - len(tokens))]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens + words,
        "tokenizer.ggml.scores": np.array([0.0] * len(tokens) + [-float(i) for i in range(len(words))], np.float32),
        "tokenizer.ggml.token_type": np.array([2, 3, 3] + [6] * 256 + [1] * len(words), np.int32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
