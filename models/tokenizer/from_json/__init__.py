r"""The `tokenizers` library's tokenizer.json -> GGUF's `tokenizer.*` metadata.

Byte-level BPE becomes `tokenizer.ggml.model` = "gpt2"; GGUF must have a name for its way of
splitting texts. SentencePiece-like BPE (byte fallback, "▁" for spaces) becomes "llama", or "gemma4"
if it splits texts as Gemma's files do, which keeps its merges. Settings that GGUF cannot express
are refused, except three that every GGUF file leaves out, as llama.cpp's own do:

* NFC normalization before byte-level BPE; it changes texts that are not composed.
* `lstrip`, `rstrip` and `single_word` of added tokens. GGUF's readers know Phi-3's `rstrip` by the
  model's name: where the flags are these, `general.name` is "phi-3".
* `Metaspace`: a space is put before a SentencePiece text, and after each special token, also where
  the text has one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...json_fields import JSONFields
from ..vocabulary import KEY, PHI_3_KEEPS, PHI_3_NAMES
from .byte_level import byte_level
from .sentencepiece import sentencepiece
from .special_tokens import chat_templates, special_tokens
from .tokens import Tokens, steps

__all__ = ["metadata_from_json"]


def metadata_from_json(
    tokenizer_json: Mapping[str, Any],
    tokenizer_config: Mapping[str, Any] | None = None,
    *,
    vocab_size: int | None = None,
    file: str = "tokenizer.json",
    config_file: str = "tokenizer_config.json",
) -> dict[str, Any]:
    """GGUF metadata of a tokenizer, as `from_metadata` and llama.cpp read it.

    Args:
      tokenizer_json: the object of tokenizer.json: a BPE model, byte-level or SentencePiece-like.
      tokenizer_config: the object of tokenizer_config.json: bos_token, eos_token, unk_token,
        pad_token, sep_token, mask_token, cls_token, add_bos_token, add_eos_token, chat_template.
        Without it BOS is the token that the post-processor puts first.
      vocab_size: rows of the embedding; ids without a token become unused ones named [PAD0]. None:
        as many as there are tokens, whose ids must then leave no gap.
      file, config_file: the names of the two in errors.

    Returns:
      `tokenizer.ggml.*` and `tokenizer.chat_template*`: lists of str, int32 and float32 arrays,
      int, bool, str; and Phi-3's `general.name`.

    Raises:
      jax_q4k.CheckpointError: a field is malformed, or asks for a setting that GGUF lacks.
    """
    root = JSONFields(dict(tokenizer_json), file)
    config = JSONFields(dict(tokenizer_config or {}), config_file)
    model = root.object("model") or root.fail("model", "is missing")
    kind = model.string("type", "BPE")  # early files leave it out
    if kind != "BPE":
        model.fail("type", f"{kind[:100]!r} is not supported, only 'BPE'")
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.string(key, ""):
            model.fail(key, "is not supported, expected none")
    if model.number("dropout", 0.0):
        model.fail("dropout", "is not supported, expected none")
    vocabulary = Tokens(root, model, vocab_size)
    splitting = steps(root.object("pre_tokenizer"), "pretokenizers")
    normalizing = steps(root.object("normalizer"), "normalizers")
    if any(step.string("type") == "ByteLevel" for step in splitting):
        metadata = byte_level(root, model, vocabulary, normalizing, splitting)
    else:
        metadata = sentencepiece(root, model, vocabulary, normalizing, splitting)
    metadata[KEY + "tokens"] = vocabulary.texts
    metadata[KEY + "token_type"] = vocabulary.types
    if set(vocabulary.added) - vocabulary.stripping == set(PHI_3_KEEPS):
        metadata["general.name"] = PHI_3_NAMES[0]
    return special_tokens(root, config, vocabulary, metadata) | chat_templates(config)
