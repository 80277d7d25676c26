"""Reduces a WordPiece or Unigram vocabulary: `python reduce_words.py NAME.gguf NAME.json`.

Writes ggml-vocab-NAME.gguf and NAME.json here, as reduce.py does for BPE. A token that is no part
of a normalized text is never chosen, so leaving it out changes no text's tokens, only their ids.
The score of unknown characters depends on the lowest score, whose token stays.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from gguf.constants import TokenType
from tokenizers import normalizers

from jax_q4k import gguf

PREFIX = "tokenizer.ggml."
PER_TOKEN = ("tokens", "token_type", "scores")


def main() -> None:
    source, golden = Path(sys.argv[1]), Path(sys.argv[2])
    metadata, entries = gguf.read_header(source).metadata, json.loads(golden.read_text())
    values = {
        key: value
        for key, value in metadata.items()
        if key.startswith(PREFIX) or key == "general.architecture"
    }
    if PREFIX + "precompiled_charsmap" in values:
        charsmap = np.asarray(values[PREFIX + "precompiled_charsmap"]).astype(np.uint8)
        normalizer = normalizers.Precompiled(charsmap.tobytes())
    else:
        normalizer = normalizers.BertNormalizer(lowercase=True)
    texts = "\0".join(normalizer.normalize_str(entry["text"]) for entry in entries)
    haystack = "\0 " + texts.replace("\0", "\0 ")
    tokens, types = values[PREFIX + "tokens"], np.asarray(values[PREFIX + "token_type"])
    scores = np.asarray(values.get(PREFIX + "scores", np.zeros(len(tokens))))
    normal = types == TokenType.NORMAL
    lowest = int(np.flatnonzero(normal)[scores[normal].argmin()])
    kept = [
        i
        for i, (token, kind) in enumerate(zip(tokens, types.tolist(), strict=True))
        if i == lowest
        or kind not in (TokenType.NORMAL, TokenType.UNUSED)
        or (kind == TokenType.NORMAL and token.replace("▁", " ").lstrip() in haystack)
    ]
    new = {old: i for i, old in enumerate(kept)}
    for key, value in values.items():
        name = key.removeprefix(PREFIX)
        if name in PER_TOKEN:
            part = [value[i] for i in kept]
            values[key] = part if name == "tokens" else np.array(part, np.asarray(value).dtype)
        elif name.endswith("_id"):
            values[key] = np.uint32(new[int(value)])
    here = Path(__file__).parent
    gguf.write(here / f"ggml-vocab-{golden.stem}.gguf", values, {})
    for entry in entries:
        for key in ("ids", "ids_with_special"):
            entry[key] = [new[i] for i in entry[key]]
    (here / f"{golden.stem}.json").write_text(json.dumps(entries))


main()
