"""Reduces a golden vocabulary to what its texts can meet: `python reduce.py NAME.gguf NAME.json`.

Writes ggml-vocab-NAME.gguf and NAME.json here. A merge applies only where its result is a part of
a text, so leaving the others out changes no text's tokens, only their ids: both files get new ones,
in the old order. Chat templates of more than a line are left out.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.constants import TokenType
from tokenizers import pre_tokenizers

from jax_q4k import gguf as reader

PREFIX = "tokenizer.ggml."
ALPHABET = pre_tokenizers.ByteLevel.alphabet()


def kept_ids(metadata: dict[str, Any], entries: list[dict[str, Any]]) -> list[int]:
    """Tokens that are parts of a text, spelled in any way, and those that no text needs to hold."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    texts = [entry["text"] for entry in entries]
    spelled = [part for text in texts for part, _ in byte_level.pre_tokenize_str(text)]
    haystack = "\0".join([*spelled, *(" " + text for text in texts)])
    haystack += "\0" + haystack.replace(" ", "\u2581")
    used = {i for entry in entries for i in entry["ids_with_special"]}
    used |= {value for key, value in metadata.items() if re.fullmatch(PREFIX + ".*_id", key)}
    always = (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED, TokenType.BYTE)
    tokens, types = metadata[PREFIX + "tokens"], metadata[PREFIX + "token_type"]
    return [
        i
        for i, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if i in used
        or token in ALPHABET
        or token in haystack
        or (kind in always and not token.startswith("[PAD"))
    ]


def reduce(source: Path, golden: Path) -> None:
    metadata = dict(reader.read_header(source).metadata)
    entries = json.loads(golden.read_text())
    kept = kept_ids(metadata, entries)
    new = {old: i for i, old in enumerate(kept)}
    for key in ("tokens", "token_type", "scores"):
        if PREFIX + key in metadata:
            values = metadata[PREFIX + key]
            metadata[PREFIX + key] = [values[i] for i in kept]
    tokens = set(metadata[PREFIX + "tokens"])
    merges = (merge.partition(" ") for merge in metadata.get(PREFIX + "merges", ()))
    metadata[PREFIX + "merges"] = [
        f"{left} {right}" for left, _, right in merges if {left, right, left + right} <= tokens
    ]
    for entry in entries:
        for key in ("ids", "ids_with_special"):
            entry[key] = [new[i] for i in entry[key]]
    write(metadata, new, Path(__file__).parent / source.name)
    lines = (json.dumps(entry, ensure_ascii=False, separators=(",", ":")) for entry in entries)
    (Path(__file__).parent / golden.name).write_text("[\n" + ",\n".join(lines) + "\n]\n")


def write(metadata: dict[str, Any], new: dict[int, int], path: Path) -> None:
    writer = gguf.GGUFWriter(path, metadata["general.architecture"])
    writer.add_name(metadata.get("general.name", ""))
    if 0 < len(template := metadata.get("tokenizer.chat_template", "")) < 500:
        writer.add_chat_template(template)
    for key, value in metadata.items():
        if not key.startswith(PREFIX):
            continue
        if key.endswith("_id"):
            writer.add_uint32(key, new[value])
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif key == PREFIX + "scores":
            writer.add_array(key, np.asarray(value).tolist())
        elif value:
            writer.add_array(key, [v if isinstance(v, str) else int(v) for v in value])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


if __name__ == "__main__":
    reduce(Path(sys.argv[1]), Path(sys.argv[2]))
