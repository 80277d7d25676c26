"""Special tokens of a folder: those that tokenizer_config.json and other files name."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...json_fields import JSONFields
from ..vocabulary import SPECIAL_TOKENS
from .tokens import Tokens

_FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")


@dataclass(frozen=True)
class Named:
    """Ids of special tokens.

    Attributes:
      bos, eos, unknown: None where no file names one.
      others: names in chat templates -> ids, such as "pad_token".
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
    around: tuple[list[int], list[int]],
    bos_token_id: int | None,
    eos_token_ids: Sequence[int],
) -> Named:
    """The special tokens; those that a text gets, and then the ids, count where config has none.

    around: what texts get at their ends. bos_token_id, eos_token_ids: of the model's other files.
    """
    found: dict[str, int | None] = {}
    for key in ("bos_token", "eos_token", "unk_token"):
        text = _token_text(config, key)
        if text is not None and text not in tokens.ids:
            config.fail(key, f"is {text[:100]!r}, which is not in the vocabulary")
        found[key] = None if text is None else tokens.ids[text]
    if found["unk_token"] is None and (text := model.string("unk_token", None)) is not None:
        found["unk_token"] = tokens.ids[text]
    spoken = around[0], around[1][::-1]  # a text's very first and last token
    candidates = [bos_token_id], eos_token_ids
    for name, ids, further, usual in zip(
        ("bos", "eos"), spoken, candidates, ("<s>", "</s>"), strict=True
    ):
        key = f"{name}_token"
        if found[key] is None:
            of_files = [i for i in (*ids, *further) if i is not None]
            found[key] = of_files[0] if of_files else tokens.ids.get(usual) if tokens.raw else None
    for name, ids in (("bos", around[0]), ("eos", around[1])):
        asked = config.boolean(f"add_{name}_token", bool(ids))
        if asked != bool(ids):
            does = "adds one" if ids else "adds none"
            warnings.warn(
                f"{config.file}: add_{name}_token is {str(asked).lower()}, but tokenizer.json's "
                f"post_processor {does}; tokenizer.json counts",
                stacklevel=4,
            )
    others = {}
    for key in SPECIAL_TOKENS:
        text = _token_text(config, key)
        if text in tokens.ids:  # published files name some that are none; only templates read them
            others[key] = tokens.ids[text]
    ends = tuple(dict.fromkeys(i for i in eos_token_ids if i != found["eos_token"]))
    return Named(found["bos_token"], found["eos_token"], found["unk_token"], others, ends)


def warn_of_added_tokens(root: JSONFields, config: JSONFields) -> None:
    """Warns where tokenizer_config.json describes added tokens otherwise than tokenizer.json."""
    found = {entry.string("content"): entry.values for entry in root.objects("added_tokens")}
    listed = config.object("added_tokens_decoder")
    for key in [] if listed is None else listed.values:
        entry = listed.object(key)  # type: ignore[union-attr]
        text = None if entry is None else entry.string("content")
        if entry is None or text is None:
            continue
        other = found.get(text)
        flags = (
            []
            if other is None
            else [f for f in _FLAGS if entry.values.get(f, other[f]) != other[f]]
        )
        if other is None or flags or str(other["id"]) != key:
            says = f"{flags[0]} of {text[:100]!r}" if flags else f"{text[:100]!r} as token {key}"
            warnings.warn(
                f"{config.file}: added_tokens_decoder gives {says}, tokenizer.json does not; "
                "tokenizer.json counts",
                stacklevel=4,
            )
            return


def _token_text(config: JSONFields, key: str) -> str | None:
    """A token of tokenizer_config.json: its text, or an object that holds it."""
    if isinstance(config.values.get(key), dict):
        entry = config.object(key)
        return None if entry is None else entry.string("content") or None
    return config.string(key, None) or None  # early files write "" for none


def chat_templates(config: JSONFields) -> dict[str, str]:
    """Name -> template; one without a name is "default"."""
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
    """GGUF's keys of chat templates, which keep the default one apart."""
    key, others = "tokenizer.chat_template", {n: t for n, t in named.items() if n != "default"}
    found: dict[str, Any] = {key: named["default"]} if "default" in named else {}
    if others:
        found["tokenizer.chat_templates"] = list(others)
    return found | {f"{key}.{name}": text for name, text in others.items()}
