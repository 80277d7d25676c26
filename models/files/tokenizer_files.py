"""The tokenizer of a Hugging Face checkpoint: tokenizer.json and the files beside it.

tokenizer_config.json names special tokens, chat_template.jinja is the chat template, those in
additional_chat_templates/ are further ones by name;
generation_config.json and config.json say which ids end generation, the first also how to sample.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jax_q4k import CheckpointError

from .. import tokenizer
from ..json_fields import JSONFields, read_bytes
from ..tokenizer.special_tokens import END_TEXTS
from . import generation_json
from .config_json import MAX_CONFIG

MAX_TOKENIZER = 1 << 26  # bytes; the largest published tokenizer.json files have half of it
MAX_TEMPLATE = 1 << 20  # bytes


def metadata(folder: Path, config: JSONFields, vocab_size: int) -> dict[str, Any]:
    """GGUF's `tokenizer.*` keys; none if the folder holds no tokenizer.

    config: config.json.
    """
    described = _optional(folder / "tokenizer.json", MAX_TOKENIZER)
    if described is None:
        for name in ("tokenizer.model", "vocab.json", "tekken.json"):
            if (folder / name).exists():
                raise CheckpointError(
                    str(folder), "tokenizer.json", f"is missing; {name} alone is not supported"
                )
        return {}
    settings = _optional(folder / "tokenizer_config.json", MAX_CONFIG)
    values = {} if settings is None else dict(settings.values)
    if templates := _templates(folder):  # since transformers 4.51; they take precedence
        values["chat_template"] = templates
    keys = tokenizer.metadata_from_json(
        described.values,
        values,
        vocab_size=vocab_size,
        file=described.file,
        config_file=str(folder / "tokenizer_config.json"),
    )
    generation = _optional(folder / "generation_config.json", MAX_CONFIG)
    _add_ids(keys, config, generation, vocab_size)
    return keys | generation_json.sampling(config if generation is None else generation)


def _optional(path: Path, max_bytes: int) -> JSONFields | None:
    return JSONFields.read(path, max_bytes) if path.exists() else None


def _templates(folder: Path) -> list[dict[str, str]]:
    """The chat templates that are files of their own, as tokenizer_config.json would name them."""
    default, others = folder / "chat_template.jinja", folder / "additional_chat_templates"
    files = {"default": default} if default.exists() else {}
    files |= {path.stem: path for path in sorted(others.glob("*.jinja"))}
    return [{"name": name, "template": _template(path)} for name, path in files.items()]


def _template(path: Path) -> str:
    try:
        return read_bytes(path, MAX_TEMPLATE).decode()
    except UnicodeDecodeError as error:
        problem = f"expected UTF-8, got {error.reason} at byte {error.start}"
        raise CheckpointError(str(path), "text", problem) from None


def _add_ids(
    keys: dict[str, Any],
    config: JSONFields,
    generation: JSONFields | None,
    vocab_size: int,
) -> None:
    """Adds BOS and EOS where the tokenizer's own files name none, further ends as EOT and EOM.

    generation_config.json has the last word, then config.json, then its text_config.
    """
    tokens = keys["tokenizer.ggml.tokens"]
    for name in ("bos", "eos"):
        key = f"{name}_token_id"
        found = [
            (source, ids)
            for source in (generation, config, config.object("text_config"))
            if source and (ids := _ids(source, key, vocab_size))
        ]
        if not found:
            continue
        source, ids = found[0]
        first = keys.setdefault(f"tokenizer.ggml.{key}", ids[0])
        if name == "bos":
            continue
        others = [token for token in ids if token != first and tokens[token] not in END_TEXTS]
        if len(others) > 2:
            source.fail(key, f"{ids!r:.200} are more tokens that end generation than GGUF can name")
        for other, token in zip(("eot", "eom"), others, strict=False):
            keys[f"tokenizer.ggml.{other}_token_id"] = token


def _ids(source: JSONFields, key: str, vocab_size: int) -> list[int]:
    """The ids under a key: one, several or none."""
    value = source.values.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
            source.fail(key, f"{token!r:.100} must be an integer from 0 to {vocab_size - 1}")
    return ids
