"""A Llama decoder written with primitives: one program for the prompt, one `while_loop` of tokens.

python examples/decoder_from_primitives.py [MODEL.gguf] [PROMPT]

Needs a file of the architecture `llama` without experts and rope scaling; the default is the demo
model. The program ends by comparing its tokens with those of `models.generate`.
"""

from __future__ import annotations

import argparse
import functools
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import jax_q4k as jq
from jax_q4k import models

PAGE_SIZE = 16

Weights = dict[str, Any]  # the file's tensors: QuantizedArrays (n, k), and norms (k,)
Pages = list[tuple[jax.Array, jax.Array]]  # keys and values of each layer


class Sizes(NamedTuple):
    """Numbers of the file's metadata; static, so that programs are compiled for them."""

    layers: int
    kv_heads: int
    head_dim: int
    theta: float
    eps: float

    @classmethod
    def of(cls, metadata: Any) -> Sizes:
        def value(key: str, default: Any = None) -> Any:
            found = metadata.get(f"llama.{key}", default)
            return sys.exit(f"the file lacks llama.{key}") if found is None else found

        heads = value("attention.head_count")
        return cls(
            value("block_count"),
            value("attention.head_count_kv", heads),
            value("attention.key_length", value("embedding_length") // heads),
            value("rope.freq_base", 10000.0),
            value("attention.layer_norm_rms_epsilon"),
        )


def empty_pages(sizes: Sizes, capacity: int) -> Pages:
    """Makes pages for one sequence of `capacity` tokens; page i has the tokens from 16 * i."""
    shape = (-(-capacity // PAGE_SIZE), sizes.kv_heads, PAGE_SIZE, sizes.head_dim)
    return [(jnp.zeros(shape), jnp.zeros(shape)) for _ in range(sizes.layers)]


def forward(
    sizes: Sizes, weights: Weights, tokens: jax.Array, start: jax.Array | int, pages: Pages
) -> tuple[jax.Array, Pages]:
    """Computes `tokens` (time,), the first of which is number `start` of the sequence.

    Stores their keys and values. Returns the logits (vocab_size,) after the last one, and pages.
    """
    time = tokens.shape[0]
    positions = start + jnp.arange(time)  # also the slots, since pages are in order
    table = jnp.arange(pages[0][0].shape[0])[None]
    frequencies = sizes.theta ** (-jnp.arange(0, sizes.head_dim, 2) / sizes.head_dim)
    angles = positions[:, None] * frequencies[None]
    x = jq.embedding(tokens, weights["token_embd.weight"])  # (time, hidden)
    updated = []
    for i, (k_pages, v_pages) in enumerate(pages):
        w = {name: weights.get(f"blk.{i}.{name}.weight") for name in LAYER}
        q, k_pages, v_pages = jq.qkv_rope_append(
            x,
            [w["attn_q"], w["attn_k"], w["attn_v"]],
            k_pages,
            v_pages,
            positions,
            jnp.cos(angles),
            jnp.sin(angles),
            interleaved=True,
            norm_weight=w["attn_norm"],
            eps=sizes.eps,
        )
        length = jnp.asarray(start + time)[None]
        seen = jq.paged_attention(q[None], k_pages, v_pages, table, length)
        x = jq.matmul(seen.reshape(time, -1), w["attn_output"], residual=x)
        x = jq.mlp(
            x,
            w["ffn_gate"],
            w["ffn_up"],
            w["ffn_down"],
            norm_weight=w["ffn_norm"],
            eps=sizes.eps,
            residual=x,
        )
        updated.append((k_pages, v_pages))
    output = weights.get("output.weight", weights["token_embd.weight"])
    logits = jq.rms_norm_matmul(x[-1:], weights["output_norm.weight"], output, eps=sizes.eps)
    return logits[0], updated


LAYER = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output")
LAYER += ("ffn_norm", "ffn_gate", "ffn_up", "ffn_down")


# Weights are arguments so that they do not become constants. Pages are donated so that they are
# updated in place.
@functools.partial(jax.jit, static_argnames="sizes", donate_argnames="pages")
def prefill(
    sizes: Sizes, weights: Weights, tokens: jax.Array, pages: Pages
) -> tuple[jax.Array, Pages]:
    return forward(sizes, weights, tokens, 0, pages)


@functools.partial(jax.jit, static_argnames=("sizes", "count"), donate_argnames="pages")
def decode(
    sizes: Sizes,
    weights: Weights,
    logits: jax.Array,
    length: jax.Array,
    end: jax.Array,
    pages: Pages,
    count: int,
) -> tuple[jax.Array, Pages]:
    """Generates greedily up to `count` tokens after a prompt of `length` tokens.

    Returns tokens (count,), which after the token `end` are all `end`, and the updated pages.
    """

    def goes_on(state: Any) -> jax.Array:
        i, tokens, _, _ = state
        return (i < count) & ((i == 0) | (tokens[i - 1] != end))

    def step(state: Any) -> Any:
        i, tokens, logits, pages = state
        token = jq.argmax(logits)
        logits, pages = forward(sizes, weights, token[None], length + i, pages)
        return i + 1, tokens.at[i].set(token), logits, pages

    start = (jnp.int32(0), jnp.full(count, end), logits, pages)
    _, tokens, _, pages = jax.lax.while_loop(goes_on, step, start)
    return tokens, pages


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", metavar="MODEL.gguf", nargs="?", default=models.demo_path())
    parser.add_argument("prompt", metavar="PROMPT", nargs="?", default="It was a fine morning")
    parser.add_argument("-n", type=int, default=24, help="maximum new tokens; default: 24")
    arguments = parser.parse_args()

    file = jq.gguf.read(arguments.model)
    if file.metadata["general.architecture"] != "llama" or "rope_freqs.weight" in file.tensors:
        sys.exit(f"{arguments.model} is no plain llama")
    tokenizer = models.tokenizer.from_gguf(arguments.model)
    prompt = jnp.array(tokenizer.encode(arguments.prompt, add_end=False))
    sizes = Sizes.of(file.metadata)

    pages = empty_pages(sizes, prompt.size + arguments.n)
    logits, pages = prefill(sizes, file.tensors, prompt, pages)
    end = -1 if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    length = jnp.int32(prompt.size)
    tokens, pages = decode(sizes, file.tensors, logits, length, jnp.int32(end), pages, arguments.n)
    new = [token for token in tokens.tolist() if token != end]
    print(tokenizer.decode(new, strip_prefix=False))

    want = models.generate(models.load(arguments.model), prompt, max_new_tokens=arguments.n)
    same = sum(a == b for a, b in zip(new, want.tokens, strict=False))
    print(f"{same} of {len(want.tokens)} tokens are those of models.generate")


if __name__ == "__main__":
    main()
