"""Loads the tokenizer of a Hugging Face checkpoint: tokenizer.json and related files.

tokenizer_config.json, or else special_tokens_map.json, names special tokens. chat_template.jinja is
the chat template; additional_chat_templates/ has further ones by name. generation_config.json and
config.json have the stop token ids; the former also has sampling parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jax_q4k import CheckpointError

from ... import tokenizer
from ...support.json_fields import JSONFields, read_bytes
from ...tokenizer import Tokenizer
from ...tokenizer.vocabulary import SPECIAL_TOKENS
from . import generation_json
from .config_json import MAX_CONFIG

MAX_TOKENIZER = 1 << 26  # bytes, twice the largest published tokenizer.json files
MAX_TEMPLATE = 1 << 20  # bytes
#: Keys of special tokens.
NAMES = ("bos_token", "eos_token", "unk_token", *SPECIAL_TOKENS)


def load(
    folder: Path, config: JSONFields, vocab_size: int, templates: Mapping[str, str]
) -> Tokenizer | None:
    """Loads the folder's tokenizer; None if it has none.

    config: config.json. templates: name -> chat template, in addition to the folder's.
    """
    described = _optional(folder / "tokenizer.json", MAX_TOKENIZER)
    if described is None:
        for name in ("tokenizer.model", "vocab.json", "tekken.json"):
            if (folder / name).exists():
                raise CheckpointError(
                    str(folder), "tokenizer.json", f"is missing; {name} alone is not supported"
                )
        return None
    settings = _optional(folder / "tokenizer_config.json", MAX_CONFIG)
    values = {} if settings is None else dict(settings.values)
    older = _optional(folder / "special_tokens_map.json", MAX_CONFIG)
    for name, text in ({} if older is None else older.values).items():
        if name in NAMES and values.get(name) is None:
            values[name] = text
    if own := _templates(folder):  # since transformers 4.51; they take precedence
        values["chat_template"] = own
    generation = _optional(folder / "generation_config.json", MAX_CONFIG)
    candidates = generation, config, config.object("text_config")
    sources = [source for source in candidates if source is not None]
    _, bos_ids = _named_ids(sources, "bos_token_id", vocab_size)
    eos_file, eos_ids = _named_ids(sources, "eos_token_id", vocab_size)
    return tokenizer.from_json(
        described.values,
        values,
        vocab_size=vocab_size,
        bos_token_id=bos_ids[0] if bos_ids else None,
        eos_token_ids=eos_ids,
        file=described.file,
        config_file=str(folder / "tokenizer_config.json"),
        eos_file=eos_file,
        templates=templates,
    )


def sampling(folder: Path, config: JSONFields) -> dict[str, Any]:
    """Returns GGUF metadata with the recommended sampling parameters; {} if the files have none."""
    generation = _optional(folder / "generation_config.json", MAX_CONFIG)
    return generation_json.sampling(config if generation is None else generation)


def _optional(path: Path, max_bytes: int) -> JSONFields | None:
    return JSONFields.read(path, max_bytes) if path.exists() else None


def _templates(folder: Path) -> list[dict[str, str]]:
    """Returns the chat templates in separate files, in the format of tokenizer_config.json."""
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


def _named_ids(sources: list[JSONFields], key: str, vocab_size: int) -> tuple[str, list[int]]:
    """Returns the first of `sources` that holds ids under the key, and the ids."""
    found = [(s.file, ids) for s in sources if (ids := _ids(s, key, vocab_size))]
    return found[0] if found else ("", [])


def _ids(source: JSONFields, key: str, vocab_size: int) -> list[int]:
    """Returns the list of token ids under a key, which may hold one id, several or none."""
    value = source.values.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
            source.fail(key, f"{token!r:.100} must be an integer from 0 to {vocab_size - 1}")
    return ids
