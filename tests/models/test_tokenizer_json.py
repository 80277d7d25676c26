"""tokenizer.json -> GGUF metadata, against llama.cpp's ids for the same vocabularies."""

from __future__ import annotations

import json
from functools import cache

import pytest
import tokenizers
from gguf.constants import TokenType
from tokenizers import Regex, decoders, normalizers, pre_tokenizers, processors
from tokenizers import models as bpe

import jax_q4k as jq
from jax_q4k.models import tokenizer

from .test_tokenizer import NAMES, VOCABULARIES, golden, load

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
PATTERN = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@cache
def tokenizer_json(name: str) -> str:
    """A golden vocabulary, written by the `tokenizers` library as its model's publisher did."""
    v = load(name).vocabulary
    types = jq.gguf.read_header(VOCABULARIES / f"ggml-vocab-{name}.gguf").metadata["tokenizer.ggml.token_type"]
    added = [t for t, kind in zip(v.tokens, types, strict=True) if kind in (TokenType.CONTROL, TokenType.UNKNOWN)]
    if name == "llama-spm":
        splits = [(t[:i], t[i:]) for t in v.tokens for i in range(1, len(t))]
        merges = [pair for pair in splits if pair[0] in v.ids and pair[1] in v.ids]
        merges.sort(key=lambda pair: -v.scores[v.ids["".join(pair)]])
        t = tokenizers.Tokenizer(bpe.BPE(v.ids, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
        t.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        t.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A <s> $B", [("<s>", 1)])
    else:
        llama = name == "llama-bpe"
        vocab = {t: i for t, i in v.ids.items() if types[i] == TokenType.NORMAL}
        t = tokenizers.Tokenizer(bpe.BPE(vocab, list(v.merges), ignore_merges=llama))
        pattern = Regex(PATTERN.replace("DIGITS", "{1,3}" if llama else ""))
        split = pre_tokenizers.Split(pattern, behavior="isolated")
        t.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
        t.decoder = decoders.ByteLevel()
        if llama:
            begin = "<|begin_of_text|>"
            template = processors.TemplateProcessing(f"{begin} $A", f"{begin} $A {begin} $B", [(begin, 128000)])
            t.post_processor = processors.Sequence([processors.ByteLevel(), template])
        else:
            t.normalizer = normalizers.NFC()
    t.add_special_tokens(added)
    return t.to_str()


@pytest.mark.parametrize("name", NAMES)
def test_golden_ids(name: str) -> None:
    v = load(name).vocabulary
    config = {"eos_token": v.tokens[v.eos_token_id]}
    metadata = tokenizer.metadata_from_json(json.loads(tokenizer_json(name)), config, vocab_size=len(v.tokens))
    got = tokenizer.from_metadata(metadata)
    assert got.vocab_size == len(v.tokens)
    for entry in golden(name):
        assert got.encode(entry["text"], add_special=False) == entry["ids"], entry["text"]
        assert got.encode(entry["text"], parse_special=True) == entry["ids_with_special"], entry["text"]
        assert got.decode(entry["ids"]) == entry["text"]
