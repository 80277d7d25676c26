"""Builds tokenizers from tokenizer.json and related files of checkpoint folders."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gguf.constants import TokenType

from jax_q4k import CheckpointError

from ...support.json_fields import JSONFields
from ..encoders import SPACE
from ..special_tokens import classify
from ..tokenizer import Tokenizer
from ..vocabulary import Vocabulary
from . import library
from .decoder import decoding
from .metadata import GEMMA_MARKUP, Described, metadata
from .special_tokens import Named, chat_templates, named_tokens, warn_of_added_tokens
from .tokens import UNIGRAM, WORDPIECE, Tokens, merges_of

__all__ = ["from_json", "metadata_from_json"]


def from_json(
    tokenizer_json: Mapping[str, Any],
    tokenizer_config: Mapping[str, Any] | None = None,
    *,
    vocab_size: int | None = None,
    bos_token_id: int | None = None,
    eos_token_ids: Sequence[int] = (),
    file: str = "tokenizer.json",
    config_file: str = "tokenizer_config.json",
    eos_file: str = "generation_config.json",
    templates: Mapping[str, str] | None = None,
) -> Tokenizer:
    """Builds the tokenizer of a tokenizer.json; ids equal those of the `tokenizers` library.

    Only the post-processor decides which tokens are added before and after a text. Warns if
    `add_bos_token` or `add_eos_token` contradict it. Ignores truncation and padding in the file.

    Args:
      tokenizer_json: the object of tokenizer.json: a BPE model, byte-level or SentencePiece-like, a
        WordPiece or a Unigram model.
      tokenizer_config: the object of tokenizer_config.json: bos_token, eos_token, unk_token,
        pad_token, sep_token, mask_token, cls_token, chat_template. Without it BOS is the first
        token that the post-processor adds.
      vocab_size: rows of the embedding; ids without a token become unused tokens such as [PAD0].
        None means the number of tokens, whose ids must then have no gaps.
      bos_token_id: from the model's other files; used if these files name none.
      eos_token_ids: from the model's other files; the first is EOS if these files name none, and
        all end generation.
      file, config_file, eos_file: names in error messages.
      templates: name -> chat template, in addition to those of `tokenizer_config`.

    Raises:
      jax_q4k.CheckpointError: a field is malformed, or needs an unsupported feature.
    """
    root = JSONFields(dict(tokenizer_json), file)
    config = JSONFields(dict(tokenizer_config or {}), config_file)
    model = _model(root)
    raw, strips = decoding(root)
    tokens = Tokens(root, model, vocab_size, raw)
    try:
        found = library.read(tokenizer_json, file)
    except CheckpointError:
        if model.string("type", "BPE") == "BPE":
            merges_of(model, tokens.ids)  # as slow as the library, but names the invalid merge
        raise
    before, after = library.affixes(found, file)
    between = library.between(found, file)
    for token in (*before, *between, *after):
        if token >= len(tokens.texts):
            root.fail("post_processor", f"adds token {token}, which is not in the vocabulary")
    named = named_tokens(config, model, tokens, (before, after), bos_token_id, eos_token_ids)
    vocabulary = _vocabulary(
        tokens,
        named,
        (before, after),
        strips=strips,
        templates=chat_templates(config) | dict(templates or {}),
        file=file,
    )
    vocabulary = dataclasses.replace(vocabulary, between=tuple(between))
    control = {text for text, _, control in vocabulary.special if control}
    encoder = library.LibraryEncoder(found, {t: tokens.ids[t] for t in tokens.added}, control, file)
    warn_of_added_tokens(root, config)
    described = Described(tokens, named, vocabulary, config_file, eos_file)
    return Tokenizer(vocabulary, encoder, functools.partial(metadata, encoder.content, described))


def metadata_from_json(
    tokenizer_json: Mapping[str, Any],
    tokenizer_config: Mapping[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Converts a tokenizer.json to GGUF metadata for `from_metadata` and llama.cpp.

    Warns of settings that GGUF has no key for, and that llama.cpp's own files omit: NFC
    normalization before byte-level BPE; bytes without a token; `lstrip`, `rstrip` and `single_word`
    of added tokens, except for Phi-3, which readers recognize by `general.name`; `normalized` of
    added tokens if a space is added before texts; other ways in which `Metaspace` adds a space;
    tokens other than BOS and EOS before or after a text.

    Args:
      tokenizer_json, tokenizer_config, options: as in `from_json`.

    Returns:
      `tokenizer.ggml.*` and `tokenizer.chat_template*`: lists of str, int32 and float32 arrays,
      int, bool, str; and `general.name` for Phi-3.

    Raises:
      jax_q4k.CheckpointError: a field is malformed, or needs a setting that GGUF lacks.
    """
    return from_json(tokenizer_json, tokenizer_config, **options).gguf_metadata()


def _model(root: JSONFields) -> JSONFields:
    model = root.object("model") or root.fail("model", "is missing")
    kind = model.string("type", "BPE")  # early files omit it
    if kind not in ("BPE", WORDPIECE, UNIGRAM):
        known = f"supported: 'BPE', {WORDPIECE!r}, {UNIGRAM!r}"
        model.fail("type", f"{kind[:100]!r} is not supported; {known}")
    if kind != "BPE":
        return model
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.string(key, ""):
            model.fail(key, "is not supported, expected none")
    if model.number("dropout", 0.0):
        model.fail("dropout", "is not supported, expected none")
    return model


def _vocabulary(
    tokens: Tokens,
    named: Named,
    affixes: tuple[list[int], list[int]],
    *,
    strips: bool,
    templates: dict[str, str],
    file: str,
) -> Vocabulary:
    types = np.array(tokens.types)
    if tokens.raw:
        for text in tokens.added:
            if text in GEMMA_MARKUP:
                types[tokens.ids[text]] = TokenType.USER_DEFINED
            elif types[tokens.ids[text]] == TokenType.USER_DEFINED and SPACE in text:
                types[tokens.ids[text]] = TokenType.NORMAL  # it represents spaces
    own_ends = [*named.ends] if named.eos is None else [named.eos, *named.ends]
    ends, overruled = classify(tokens.ids, lambda key: None, own_ends)
    types[list(overruled)] = list(overruled.values())
    special = {"bos_token": named.bos, "eos_token": named.eos, "unk_token": named.unknown}
    special_ids = {name: i for name, i in special.items() if i is not None} | named.others
    return Vocabulary(
        tokens=tuple(tokens.texts),
        ids={text: i for i, text in enumerate(tokens.texts)},
        types=types,
        raw=tokens.raw,
        adds_space=strips,
        bos_token_id=named.bos,
        eos_token_id=named.eos,
        unknown_token_id=named.unknown,
        eos_token_ids=ends,
        before=tuple(affixes[0]),
        after=tuple(affixes[1]),
        special_ids=special_ids,
        chat_templates=templates,
        file=file,
    )
