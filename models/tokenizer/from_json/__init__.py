"""Tokenizers of folders: tokenizer.json, by the `tokenizers` library, and its relatives."""

from __future__ import annotations

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
from .tokens import Tokens, merges_of

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
) -> Tokenizer:
    """The tokenizer of a tokenizer.json: its ids are the `tokenizers` library's for that file.

    The post-processor alone says what a text gets at its ends; `add_bos_token` and `add_eos_token`
    that say otherwise are warned of. Truncation and padding of the file do not count.

    Args:
      tokenizer_json: the object of tokenizer.json: a BPE model, byte-level or SentencePiece-like.
      tokenizer_config: the object of tokenizer_config.json: bos_token, eos_token, unk_token,
        pad_token, sep_token, mask_token, cls_token, chat_template. Without it BOS is the token that
        the post-processor puts first.
      vocab_size: rows of the embedding; ids without a token become unused ones named [PAD0]. None:
        as many as there are tokens, whose ids must then leave no gap.
      bos_token_id: of the model's other files, where these name none.
      eos_token_ids: of the model's other files: the first counts where these name none, all end
        generation.
      file, config_file, eos_file: names in errors.

    Raises:
      jax_q4k.CheckpointError: a field is malformed, or asks for what is not supported.
    """
    root = JSONFields(dict(tokenizer_json), file)
    config = JSONFields(dict(tokenizer_config or {}), config_file)
    model = _model(root)
    raw, strips = decoding(root)
    tokens = Tokens(root, model, vocab_size, raw)
    try:
        found = library.read(tokenizer_json, file)
    except CheckpointError:
        merges_of(model, tokens.ids)  # which takes as long as the library, and says which is wrong
        raise
    before, after = library.around(found, file)
    for token in (*before, *after):
        if token >= len(tokens.texts):
            root.fail("post_processor", f"adds token {token}, which is not in the vocabulary")
    named = named_tokens(config, model, tokens, (before, after), bos_token_id, eos_token_ids)
    vocabulary = _vocabulary(
        tokens, named, (before, after), strips=strips, templates=chat_templates(config), file=file
    )
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
    """GGUF metadata of a tokenizer, as `from_metadata` and llama.cpp read it.

    Warns of what GGUF cannot say and llama.cpp's own files leave out: NFC normalization before
    byte-level BPE, and bytes that it has no token for; `lstrip`, `rstrip` and `single_word` of
    added tokens, but for Phi-3's, whose readers know it by `general.name`, and `normalized` where a
    space is put before texts; spaces that `Metaspace` puts there in another way; tokens at a text's
    ends other than BOS and EOS.

    Args:
      tokenizer_json, tokenizer_config, options: as `from_json` takes them.

    Returns:
      `tokenizer.ggml.*` and `tokenizer.chat_template*`: lists of str, int32 and float32 arrays,
      int, bool, str; and Phi-3's `general.name`.

    Raises:
      jax_q4k.CheckpointError: a field is malformed, or asks for a setting that GGUF lacks.
    """
    return from_json(tokenizer_json, tokenizer_config, **options).gguf_metadata()


def _model(root: JSONFields) -> JSONFields:
    model = root.object("model") or root.fail("model", "is missing")
    kind = model.string("type", "BPE")  # early files leave it out
    if kind != "BPE":
        model.fail("type", f"{kind[:100]!r} is not supported, only 'BPE'")
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.string(key, ""):
            model.fail(key, "is not supported, expected none")
    if model.number("dropout", 0.0):
        model.fail("dropout", "is not supported, expected none")
    return model


def _vocabulary(
    tokens: Tokens,
    named: Named,
    around: tuple[list[int], list[int]],
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
                types[tokens.ids[text]] = TokenType.NORMAL  # which stands for spaces
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
        before=tuple(around[0]),
        after=tuple(around[1]),
        special_ids=special_ids,
        chat_templates=templates,
        file=file,
    )
