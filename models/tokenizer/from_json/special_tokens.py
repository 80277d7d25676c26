"""Special tokens: those of tokenizer_config.json, and those that the post-processor adds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...json_fields import JSONFields
from ..vocabulary import KEY, SPECIAL_TOKENS
from .tokens import Tokens, steps

_NAMES = {"bos_token": "bos_token_id", "eos_token": "eos_token_id", "unk_token": "unknown_token_id"}


def special_tokens(
    root: JSONFields, config: JSONFields, tokens: Tokens, metadata: Mapping[str, Any]
) -> dict[str, Any]:
    """`metadata` with the ids of BOS, EOS, unknown and padding, and whether encoding adds two."""
    found = dict(metadata)
    for key, name in _NAMES.items():
        text = _token_text(config, key)
        if text is None:
            continue
        if text not in tokens.ids:
            config.fail(key, f"is {text[:100]!r}, which is not in the vocabulary")
        found[KEY + name] = tokens.ids[text]
    for key, name in SPECIAL_TOKENS.items():
        text = _token_text(config, key)
        if text in tokens.ids:  # published files name some that are none; only templates read them
            found[KEY + name] = tokens.ids[text]
    before, after = _template(root, tokens)
    for name, ids in (("bos", before), ("eos", after)):
        if ids and found.setdefault(f"{KEY}{name}_token_id", ids[0]) != ids[0]:
            problem = f"adds token {ids[0]}, which is not the {name}_token of {config.file}"
            root.fail("post_processor", problem)
        if metadata[KEY + "model"] == "llama" and f"{KEY}{name}_token_id" not in found:
            # SentencePiece's names; readers would take ids 1 and 2.
            text = {"bos": "<s>", "eos": "</s>"}[name]
            if text not in tokens.ids:
                config.fail(f"{name}_token", f"is missing, and {text!r} is not in the vocabulary")
            found[f"{KEY}{name}_token_id"] = tokens.ids[text]
        add = config.boolean(f"add_{name}_token", bool(ids))
        if add and f"{KEY}{name}_token_id" not in found:
            config.fail(f"add_{name}_token", f"is true, but there is no {name}_token")
        if name == "bos" and not add and metadata[KEY + "model"] == "gemma4":
            config.fail("add_bos_token", "is false, but texts of Gemma begin with one in GGUF")
        found[f"{KEY}add_{name}_token"] = add
    return found


def _token_text(config: JSONFields, key: str) -> str | None:
    """A token of tokenizer_config.json: its text, or an object that holds it."""
    if isinstance(config.values.get(key), dict):
        entry = config.object(key)
        return None if entry is None else entry.string("content") or None
    return config.string(key, None) or None  # early files write "" for none


def _template(root: JSONFields, tokens: Tokens) -> tuple[list[int], list[int]]:
    """Ids that the post-processor puts before and after a text: at most one each."""
    before: list[int] = []
    after: list[int] = []
    for step in steps(root.object("post_processor"), "processors"):
        kind = step.string("type")
        if kind == "ByteLevel":  # it concerns offsets only
            continue
        if kind != "TemplateProcessing":
            step.fail("type", f"{kind[:100]!r} is not supported, expected 'TemplateProcessing'")
        seen = False
        for entry in step.objects("single"):
            special = entry.object("SpecialToken")
            if special is None:
                if entry.object("Sequence") is None or seen:
                    step.fail("single", "expected special tokens around one sequence")
                seen = True
                continue
            text = special.string("id")
            if text not in tokens.ids:
                special.fail("id", f"is {text[:100]!r}, which is not in the vocabulary")
            (after if seen else before).append(tokens.ids[text])
        if len(before) > 1 or len(after) > 1:
            step.fail("single", "adds more than one token at an end, which is not supported")
    return before, after


def chat_templates(config: JSONFields) -> dict[str, Any]:
    """One template, or a list of them by name, of which GGUF keeps one, "default", apart."""
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
    key = "tokenizer.chat_template"
    found: dict[str, Any] = {key: named.pop("default")} if "default" in named else {}
    if named:
        found["tokenizer.chat_templates"] = list(named)
    return found | {f"{key}.{name}": text for name, text in named.items()}
