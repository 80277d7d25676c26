"""Files whose parts are valid but inconsistent, and damaged files, loaded by `models.from_gguf`."""

import struct

import numpy as np
import pytest
from gguf.constants import GGUFValueType as Value
from support.gguf_bytes import array_entry, damage, entry, parse, rewritten, string, text_entry, u32
from tokenizers import pre_tokenizers

import jax_q4k as jq
from jax_q4k import models

from ..golden_files import path

VOCABULARY_SIZE = 512  # that of llama-gqa
KEY = "tokenizer.ggml."


def number(key, value):
    return {key: entry(key, Value.UINT32, u32(value))}


def real(key, value):
    return {key: entry(key, Value.FLOAT64, struct.pack("<d", value))}


def text(key, value):
    return {key: text_entry(key, value)}


def numbers(key, kind, code, values):
    return {key: array_entry(key, kind, [struct.pack(code, value) for value in values])}


def texts(key, values):
    return {key: array_entry(key, Value.STRING, [string(value) for value in values])}


def sentencepiece():
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += ["▁", *"abcdefgh", "▁a", "ab", "<|im_end|>"]
    tokens += [f"tok{i}" for i in range(len(tokens), VOCABULARY_SIZE)]
    types = [2, 3, 3, *[6] * 256, *[1] * (VOCABULARY_SIZE - 259)]
    return {
        **text(KEY + "model", "llama"),
        **texts(KEY + "tokens", tokens),
        **numbers(KEY + "scores", Value.FLOAT32, "<f", range(0, -VOCABULARY_SIZE, -1)),
        **numbers(KEY + "token_type", Value.INT32, "<i", types),
        **number(KEY + "bos_token_id", 1),
        **number(KEY + "eos_token_id", 2),
    }


def byte_level():
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [(a, b) for a in "abcdefghij" for b in "aeiounrst"]
    tokens = [*letters, *(a + b for a, b in pairs), "<|im_end|>"]
    tokens += [f"<|tok{i}|>" for i in range(len(tokens), VOCABULARY_SIZE)]
    return {
        **text(KEY + "model", "gpt2"),
        **text(KEY + "pre", "qwen2"),
        **texts(KEY + "tokens", tokens),
        **texts(KEY + "merges", [f"{a} {b}" for a, b in pairs]),
        **numbers(KEY + "token_type", Value.INT32, "<i", [1] * VOCABULARY_SIZE),
        **number(KEY + "eos_token_id", VOCABULARY_SIZE - 1),
    }


ARRAYS = [
    (f"{key}-of-{count}", numbers(key, Value.UINT32, "<I", [1] * count), f"{key}: {message}")
    for key, message in (
        (
            "general.architecture",
            r"array\(.*\) is not supported; supported: bert, cohere2, command-r",
        ),
        ("tokenizer.ggml.model", "is of type ndarray, expected str"),
        ("llama.rope.scaling.type", r"array\(.*\) is not supported; supported: none, linear"),
        ("llama.rope.scaling.factor", "must be a number above"),
        ("llama.rope.scale_linear", "must be a number above"),
    )
    for count in (0, 2)
]


@pytest.mark.parametrize(
    ("entries", "message"),
    [pytest.param(entries, message, id=label) for label, entries, message in ARRAYS]
    + [
        (number("llama.block_count", 0), "llama.block_count: must be an integer from 1"),
        (
            number("llama.block_count", 3),
            "tensor 'blk.2.attn_q.weight': is missing, expected with shape",
        ),
        (number("llama.block_count", 1), "tensor 'blk.1.*': is not part of a llama model"),
        (
            number("llama.attention.head_count", 0),
            "llama.attention.head_count: must be an integer from 1",
        ),
        (
            number("llama.attention.head_count", 5),
            "head_count_kv: 2 must divide attention.head_count=5",
        ),
        (
            number("llama.attention.head_count", 8),
            r"'blk.0.attn_q.weight': has shape \(256, 256\), expected \(512",
        ),
        (number("llama.attention.key_length", 0), "key_length: must be an integer"),
        (
            number("llama.vocab_size", 511),
            r"'token_embd.weight': has shape \(512, 256\), expected \(511, 256\)",
        ),
        (
            number("llama.embedding_length", 2**31),
            "llama.embedding_length: must be an integer from 1 to 16777216",
        ),
        (
            real("llama.rope.scaling.factor", 1e-300),
            "llama.rope.scaling.factor: must be a number above 1e-06",
        ),
        (
            sentencepiece() | texts(KEY + "tokens", ["a"]),
            "tokenizer.ggml.scores: has 512 entries, but there are 1",
        ),
        (
            sentencepiece() | text("tokenizer.ggml.model", "rwkv"),
            "tokenizer.ggml.model: is 'rwkv'; supported:",
        ),
        (
            text("general.architecture", "x" * 10**6),
            r"'x{499} \.\.\. x+' is not supported; supported: bert, cohere2, command-r",
        ),
    ],
)
def test_metadata_that_no_model_has(entries, message, tmp_path):
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(rewritten(path("llama-gqa"), entries))
    with pytest.raises(jq.GGUFError, match=f"{bad}: .*{message}"):
        models.from_gguf(bad)


@pytest.mark.parametrize("divisor", [0.0, -1.0, 1e-40])
def test_rope_divisors_that_give_no_finite_angle(divisor, tmp_path):
    data = bytearray(path("llama3-rope").read_bytes())
    header = jq.gguf.read_header(path("llama3-rope"))
    at = header.data_start + header.tensors["rope_freqs.weight"].offset + 8
    data[at : at + 4] = struct.pack("<f", divisor)
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(data)
    with pytest.raises(
        jq.GGUFError, match="tensor 'rope_freqs.weight': must hold numbers above 1e-06"
    ):
        models.from_gguf(bad)


@pytest.mark.slow("compiles several programs")
@pytest.mark.parametrize("vocabulary", [sentencepiece, byte_level])
def test_damaged_models(vocabulary, tmp_path):
    """Each of 1,000 damaged files is refused, or gives a model whose tokenizer works."""
    data = rewritten(path("llama-gqa"), vocabulary())
    header, rng = parse(data).data_start, np.random.default_rng(0)
    damaged, loaded = tmp_path / "damaged.gguf", 0
    for _ in range(1000):
        damaged.write_bytes(damage(data, header, rng))
        try:
            model = models.from_gguf(damaged)
        except jq.GGUFError as error:
            assert error.file == str(damaged) and error.field and error.problem
            continue
        loaded += 1
        if model.tokenizer is not None:
            ids = model.tokenizer.encode("hello wörld <|im_end|> 日本")
            assert all(0 <= i < model.config.vocab_size for i in ids)
            model.tokenizer.decode(range(model.config.vocab_size), skip_special=False)
    assert 50 < loaded < 500
