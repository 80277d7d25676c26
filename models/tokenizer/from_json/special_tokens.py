"""Finds the special tokens of a checkpoint folder in tokenizer_config.json and other files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...support.json_fields import JSONFields
from ...support.warn import warn
from ..vocabulary import SPECIAL_TOKENS
from .tokens import Tokens

_FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")


@dataclass(frozen=True)
class Named:
    """Ids of a tokenizer's special tokens.

    Attributes:
      bos, eos, unknown: None if no file names one.
      others: name in chat templates, such as "pad_token" -> id.
      ends: further ids that end generation.
    """

    bos: int | None
    eos: int | None
    unknown: int | None
    others: dict[str, int]
    ends: tuple[int, ...]


def named_tokens(
    config: JSONFields,
    model: JSONFields,
    tokens: Tokens,
    affixes: tuple[list[int], list[int]],
    bos_token_id: int | None,
    eos_token_ids: Sequence[int],
) -> Named:
    """Finds a tokenizer's special tokens.

    If `config` names none, uses the tokens added around a text, then the ids of other files.

    affixes: tokens added before and after a text. bos_token_id, eos_token_ids: from the model's
    other files.
    """
    found = {key: _token_id(config, key, tokens) for key in ("bos_token", "eos_token", "unk_token")}
    if found["unk_token"] is None and (text := model.string("unk_token", None)) is not None:
        found["unk_token"] = tokens.ids[text]
    before, after = affixes
    first = [*before, *([] if bos_token_id is None else [bos_token_id])]
    last = [*reversed(after), *eos_token_ids]
    for key, ids, usual in (("bos_token", first, "<s>"), ("eos_token", last, "</s>")):
        if found[key] is None:
            found[key] = ids[0] if ids else tokens.ids.get(usual) if tokens.raw else None
    for key, ids in (("add_bos_token", before), ("add_eos_token", after)):
        if (asked := config.boolean(key, bool(ids))) != bool(ids):
            does = "adds one" if ids else "adds none"
            warn(
                f"{config.file}: {key} is {str(asked).lower()}, but tokenizer.json's "
                f"post_processor {does}; using tokenizer.json"
            )
    others = {}
    for key in SPECIAL_TOKENS:
        text = _token_text(config, key)
        if text in tokens.ids:  # some files name missing tokens; only templates use them
            others[key] = tokens.ids[text]
    ends = tuple(dict.fromkeys(i for i in eos_token_ids if i != found["eos_token"]))
    return Named(found["bos_token"], found["eos_token"], found["unk_token"], others, ends)


def warn_of_added_tokens(root: JSONFields, config: JSONFields) -> None:
    """Warns if tokenizer_config.json and tokenizer.json describe added tokens differently."""
    found = {entry.string("content"): entry.values for entry in root.objects("added_tokens")}
    listed = config.object("added_tokens_decoder") or JSONFields({}, config.file)
    for key in listed.values:
        entry = listed.object(key) or listed.fail(key, "must be an object, not null")
        text = entry.string("content")
        other = found.get(text, {})
        flags = [flag for flag in _FLAGS if entry.values.get(flag) not in (None, other.get(flag))]
        if flags or str(other.get("id")) != key:
            says = (
                f"{flags[0]} of {text[:100]!r}" if other and flags else f"{text[:100]!r} as {key}"
            )
            warn(
                f"{config.file}: added_tokens_decoder gives {says}, but tokenizer.json does "
                "not; using tokenizer.json"
            )
            return


def _token_id(config: JSONFields, key: str, tokens: Tokens) -> int | None:
    """Returns the id of a token in tokenizer_config.json; rejects one outside the vocabulary."""
    text = _token_text(config, key)
    if text is not None and text not in tokens.ids:
        config.fail(key, f"is {text[:100]!r}, which is not in the vocabulary")
    return None if text is None else tokens.ids[text]


def _token_text(config: JSONFields, key: str) -> str | None:
    """Returns the text of a token that tokenizer_config.json names; None if it names none.

    The file has the text, or an object with the text.
    """
    if isinstance(config.values.get(key), dict):
        entry = config.object(key)
        return None if entry is None else entry.string("content") or None
    return config.string(key, None) or None  # early files write "" for none


def chat_templates(config: JSONFields) -> dict[str, str]:
    """Returns the chat templates by name; an unnamed template is "default"."""
    template = config.values.get("chat_template")
    if isinstance(template, list):
        entries = config.objects("chat_template")
        named = {entry.string("name"): entry.string("template") for entry in entries}
    else:
        named = {} if template is None else {"default": config.string("chat_template")}
    for name, text in named.items():
        try:
            (name + text).encode()
        except UnicodeEncodeError:
            config.fail("chat_template", "holds a lone surrogate")
    return named


def template_metadata(named: dict[str, str]) -> dict[str, Any]:
    """Returns GGUF metadata of chat templates; the default one has a separate key."""
    key, others = "tokenizer.chat_template", {n: t for n, t in named.items() if n != "default"}
    found: dict[str, Any] = {key: named["default"]} if "default" in named else {}
    if others:
        found["tokenizer.chat_templates"] = list(others)
    return found | {f"{key}.{name}": text for name, text in others.items()}
