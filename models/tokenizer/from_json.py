r"""The `tokenizers` library's tokenizer.json -> GGUF's `tokenizer.*` metadata.

Byte-level BPE becomes `tokenizer.ggml.model` = "gpt2"; how it splits words must be one of the ways that GGUF has
a name for. SentencePiece-like BPE (byte fallback, "▁" for spaces) becomes "llama"; see `sentencepiece`. What
neither can say is refused, but for what every GGUF file leaves out, as llama.cpp's own do:

* NFC normalization before byte-level BPE; it changes texts that are not composed.
* `lstrip`, `rstrip` and `single_word` of added tokens.
* A space before a SentencePiece text is added always and after each special token too, not only where the text
  has none (`Metaspace`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from gguf.constants import TokenType

from ..json_fields import Fields
from .encoders import LONGEST_MERGED, MAX_MERGES, SPACE
from .pretokenizers import PRE_TOKENIZERS, by_patterns
from .vocabulary import BYTE_TOKEN, KEY

Merges = list[tuple[str, str]]

_LOOKS_SPECIAL = re.compile(r"<[|｜].*[|｜]>")  # <|im_start|>: never to be read in a user's text, whatever its flag

_SPECIAL = {"bos_token": "bos_token_id", "eos_token": "eos_token_id", "unk_token": "unknown_token_id"}


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
      tokenizer_json: what tokenizer.json holds. A BPE model, byte-level or SentencePiece-like.
      tokenizer_config: what tokenizer_config.json holds: bos_token, eos_token, unk_token, pad_token,
        add_bos_token, add_eos_token, chat_template. Without it BOS is what the post-processor puts first.
      vocab_size: rows of the embedding; ids without a token become unused ones named [PAD0]. None: as many as
        there are tokens, whose ids must then leave no gap.
      file, config_file: what error messages call the two.

    Returns:
      `tokenizer.ggml.*` and `tokenizer.chat_template`: lists of str, int32 and float32 arrays, int, bool, str.

    Raises:
      jax_q4k.CheckpointError: a field is malformed, or asks for what GGUF has no word for.
    """
    root = Fields(dict(tokenizer_json), file)
    config = Fields(dict(tokenizer_config or {}), config_file)
    model = root.fields("model") or root.fail("model", "is missing")
    kind = model.get("type", str, "BPE")  # early files leave it out
    if kind != "BPE":
        model.fail("type", f"{kind[:100]!r} is not supported, only 'BPE'")
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key, str, ""):
            model.fail(key, "is not supported, expected none")
    if model.get("dropout", float, 0.0):
        model.fail("dropout", "is not supported, expected none")
    vocabulary = _Tokens(root, model, vocab_size)
    splitting = _flat(root.fields("pre_tokenizer"), "pretokenizers")
    normalizing = _flat(root.fields("normalizer"), "normalizers")
    if any(step.get("type", str) == "ByteLevel" for step in splitting):
        metadata = _byte_level(root, model, vocabulary, normalizing, splitting)
    else:
        metadata = _sentencepiece(root, model, vocabulary, normalizing, splitting)
    metadata[KEY + "tokens"] = vocabulary.texts
    metadata[KEY + "token_type"] = vocabulary.types
    return _special_tokens(root, config, vocabulary, metadata) | _chat_template(config)


class _Tokens:
    """Texts and types by id, padded to `size`; `ids` and `added` are of the file's own tokens."""

    def __init__(self, root: Fields, model: Fields, size: int | None) -> None:
        self.ids: dict[str, int] = {}
        self.added: dict[str, bool] = {}  # text -> whether it is special
        for text, token in model.get("vocab", dict).items():
            if not isinstance(token, int) or isinstance(token, bool) or token < 0:
                model.fail("vocab", f"{text[:100]!r} has id {token!r:.100}, expected an integer from 0")
            self.ids[text] = token
        for entry in root.objects("added_tokens"):
            text, token = entry.get("content", str), entry.get("id", int)
            if self.ids.setdefault(text, token) != token:
                entry.fail("id", f"is {token} for {text[:100]!r}, which has id {self.ids[text]} already")
            self.added[text] = entry.get("special", bool, False)
        count = len(self.ids) if size is None else size
        if not self.ids:
            model.fail("vocab", "is empty")
        texts: dict[int, str] = {}
        for text, token in self.ids.items():
            try:
                text.encode()
            except UnicodeEncodeError:
                model.fail("vocab", f"the token of id {token} holds a lone surrogate")
            if not text:
                model.fail("vocab", f"the token of id {token} is empty")
            if not 0 <= token < count:
                why = "the number of tokens: ids leave a gap" if size is None else "the model's vocab_size"
                model.fail("vocab", f"{text[:100]!r} has id {token}, expected less than {count}, {why}")
            if texts.setdefault(token, text) != text:
                model.fail("vocab", f"{text[:100]!r} and {texts[token][:100]!r} both have id {token}")
        self.texts = [texts.get(i, f"[PAD{i}]") for i in range(count)]
        for i in range(count):
            if i not in texts and self.texts[i] in self.ids:
                model.fail("vocab", f"holds {self.texts[i]!r}, the name of padding")
        self.types = np.full(count, TokenType.UNUSED, np.int32)
        self.types[list(self.ids.values())] = TokenType.NORMAL
        for text, special in self.added.items():
            control = special or _LOOKS_SPECIAL.fullmatch(text)
            self.types[self.ids[text]] = TokenType.CONTROL if control else TokenType.USER_DEFINED


def _flat(step: Fields | None, key: str) -> list[Fields]:
    """The steps of a normalizer, pre-tokenizer or post-processor, whose sequences hold theirs under `key`."""
    if step is None:
        return []
    if step.get("type", str) != "Sequence":
        return [step]
    steps = step.objects(key)
    for inner in steps:
        if inner.get("type", str) == "Sequence":
            inner.fail("type", "a sequence in a sequence is not supported")
    return steps


def _merges(model: Fields, ids: Mapping[str, int]) -> Merges:
    """By rank; written as "a b" or, in newer files, as ["a", "b"]."""
    values = model.get("merges", list)
    if len(values) > MAX_MERGES:
        model.fail("merges", f"has {len(values)} entries, expected at most {MAX_MERGES}")
    merges: Merges = []
    for rank, value in enumerate(values):
        pair = value.split(" ") if isinstance(value, str) else value
        if (
            not isinstance(pair, list)
            or len(pair) != 2
            or not all(isinstance(part, str) and part in ids and " " not in part for part in pair)
            or "".join(pair) not in ids
        ):
            model.fail(f"merges[{rank}]", f"is {value!r:.200}, expected two tokens without spaces that form a third")
        merges.append((pair[0], pair[1]))
    return merges


def _byte_level(
    root: Fields, model: Fields, tokens: _Tokens, normalizing: list[Fields], splitting: list[Fields]
) -> dict[str, Any]:
    for step in normalizing:
        if step.get("type", str) != "NFC":
            step.fail("type", f"{step.get('type', str)[:100]!r} is not supported before byte-level BPE, only 'NFC'")
    patterns = []
    for i, step in enumerate(splitting):
        match step.get("type", str):
            case "Split":
                patterns.append(_pattern(step))
            case "Digits" if step.get("individual_digits", bool, False):
                patterns.append(r"\p{N}")
            case "ByteLevel" if i == len(splitting) - 1:
                if step.get("add_prefix_space", bool, True):
                    step.fail("add_prefix_space", "is true, which is not supported")
                if step.get("use_regex", bool, True):
                    patterns.append(PRE_TOKENIZERS["gpt-2"].patterns[0])
            case kind:
                step.fail("type", f"{kind[:100]!r} is not supported here")
    ignore_merges = model.get("ignore_merges", bool, False)
    pre = by_patterns(tuple(patterns), ignore_merges)
    if pre is None:
        root.fail(
            "pre_tokenizer", f"splits by {patterns!r} with ignore_merges={ignore_merges}, which has no name in GGUF"
        )
    merges = [f"{left} {right}" for left, right in _merges(model, tokens.ids)]
    return {KEY + "model": "gpt2", KEY + "pre": pre, KEY + "merges": merges}


def _pattern(step: Fields) -> str:
    """The regular expression of a Split whose matches are words, and so is what lies between them."""
    pattern = step.fields("pattern")
    if pattern is None:
        step.fail("pattern", "is missing")
    # "Removed" and inverted drops what lies between matches: nothing, with patterns that match every character.
    if (step.get("behavior", str), step.get("invert", bool, False)) not in (("Isolated", False), ("Removed", True)):
        step.fail("behavior", "is not supported, expected 'Isolated', not inverted")
    return pattern.get("Regex", str)


def _special_tokens(root: Fields, config: Fields, tokens: _Tokens, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """`metadata` with BOS, EOS, unknown and padding ids, and whether encoding adds the first two."""
    found = dict(metadata)
    for key, name in _SPECIAL.items():
        text = _token_text(config, key)
        if text is None:
            continue
        if text not in tokens.ids:
            config.fail(key, f"is {text[:100]!r}, which is not in the vocabulary")
        found[KEY + name] = tokens.ids[text]
    padding = _token_text(config, "pad_token")
    if padding in tokens.ids:  # published files name one that is no token; nothing here pads
        found[KEY + "padding_token_id"] = tokens.ids[padding]
    before, after = _template(root, tokens)
    for name, ids in (("bos", before), ("eos", after)):
        if ids and found.setdefault(f"{KEY}{name}_token_id", ids[0]) != ids[0]:
            root.fail("post_processor", f"adds token {ids[0]}, which is not the {name}_token of {config.file}")
        if metadata[KEY + "model"] == "llama" and f"{KEY}{name}_token_id" not in found:
            text = {"bos": "<s>", "eos": "</s>"}[name]  # what SentencePiece calls them; readers take ids 1 and 2
            if text not in tokens.ids:
                config.fail(f"{name}_token", f"is missing, and {text!r} is not in the vocabulary")
            found[f"{KEY}{name}_token_id"] = tokens.ids[text]
        add = config.get(f"add_{name}_token", bool, bool(ids))
        if add and f"{KEY}{name}_token_id" not in found:
            config.fail(f"add_{name}_token", f"is true, but there is no {name}_token")
        found[f"{KEY}add_{name}_token"] = add
    return found


def _token_text(config: Fields, key: str) -> str | None:
    """A token of tokenizer_config.json: its text, or an object that holds it."""
    if isinstance(config.values.get(key), dict):
        entry = config.fields(key)
        return None if entry is None else entry.get("content", str)
    return config.get(key, str, None)


def _template(root: Fields, tokens: _Tokens) -> tuple[list[int], list[int]]:
    """Ids that the post-processor puts before and after a text: at most one each."""
    before: list[int] = []
    after: list[int] = []
    for step in _flat(root.fields("post_processor"), "processors"):
        kind = step.get("type", str)
        if kind == "ByteLevel":  # it concerns offsets only
            continue
        if kind != "TemplateProcessing":
            step.fail("type", f"{kind[:100]!r} is not supported, expected 'TemplateProcessing'")
        seen = False
        for entry in step.objects("single"):
            special = entry.fields("SpecialToken")
            if special is None:
                if entry.fields("Sequence") is None or seen:
                    step.fail("single", "expected special tokens around one sequence")
                seen = True
                continue
            text = special.get("id", str)
            if text not in tokens.ids:
                special.fail("id", f"is {text[:100]!r}, which is not in the vocabulary")
            (after if seen else before).append(tokens.ids[text])
        if len(before) > 1 or len(after) > 1:
            step.fail("single", "adds more than one token at an end, which is not supported")
    return before, after


def _chat_template(config: Fields) -> dict[str, str]:
    """One template, or the one that is called "default" of a list."""
    template = config.values.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name", str): entry.get("template", str) for entry in config.objects("chat_template")}
        template = named.get("default")
    elif template is not None:
        template = config.get("chat_template", str)
    if template is None:
        return {}
    try:
        template.encode()
    except UnicodeEncodeError:
        config.fail("chat_template", "holds a lone surrogate")
    return {"tokenizer.chat_template": template}


def _sentencepiece(
    root: Fields, model: Fields, tokens: _Tokens, normalizing: list[Fields], splitting: list[Fields]
) -> dict[str, Any]:
    """A vocabulary with scores in place of merges.

    SentencePiece's rule joins the neighbours that form the token of the highest score; here each token's score
    is minus the place that its first merge has among all tokens'. That is the same order if every way of
    splitting a token in two is a merge, and the merges of one token stand together, as in files converted from
    SentencePiece. Runs of one character (Llama 2's spaces) interleave there and share one score.
    """
    prefix, replaced = False, False
    for step in normalizing:
        match step.get("type", str):
            case "Prepend" if step.get("prepend", str) == SPACE:
                prefix = True
            case "Replace" if _is_space(step.fields("pattern")) and step.get("content", str) == SPACE:
                replaced = True
            case kind:
                step.fail(
                    "type", f"{kind[:100]!r} of this kind is not supported; expected are spaces written as {SPACE!r}"
                )
    for step in splitting:
        kind = step.get("type", str)
        if kind != "Metaspace" or step.get("replacement", str) != SPACE:
            step.fail("type", f"{kind[:100]!r} is not supported, expected 'ByteLevel' or 'Metaspace' of {SPACE!r}")
        scheme = step.get("prepend_scheme", str, "always" if step.get("add_prefix_space", bool, True) else "never")
        prefix, replaced = prefix or scheme != "never", True
        inner = next((text for text in tokens.ids if SPACE in text[1:] and text not in tokens.added), None)
        if step.get("split", bool, True) and inner is not None:
            step.fail("split", f"is true, so that {inner!r} would never be formed; GGUF cannot say so")
    if not replaced:
        root.fail("normalizer", f"does not write spaces as {SPACE!r}: neither byte-level nor SentencePiece's BPE")
    if not model.get("byte_fallback", bool, False):
        model.fail("byte_fallback", "must be true for BPE that is not byte-level")
    missing = next((f"<0x{byte:02X}>" for byte in range(256) if f"<0x{byte:02X}>" not in tokens.ids), None)
    if missing is not None:
        model.fail("vocab", f"lacks {missing!r}, a byte token")
    for text, token in tokens.ids.items():
        if BYTE_TOKEN.fullmatch(text):
            tokens.types[token] = TokenType.BYTE
    metadata: dict[str, Any] = {KEY + "model": "llama", KEY + "pre": "default", KEY + "add_space_prefix": prefix}
    unknown = model.get("unk_token", str, None)
    if unknown is not None:
        if unknown not in tokens.ids:
            model.fail("unk_token", f"is {unknown[:100]!r}, which is not in the vocabulary")
        metadata[KEY + "unknown_token_id"] = tokens.ids[unknown]
        tokens.types[tokens.ids[unknown]] = TokenType.UNKNOWN
    metadata[KEY + "scores"] = _scores(model, tokens)
    return metadata


def _is_space(pattern: Fields | None) -> bool:
    return pattern is not None and pattern.values == {"String": " "}


def _scores(model: Fields, tokens: _Tokens) -> np.ndarray:
    """float32 (vocabulary,)."""
    merges = _merges(model, tokens.ids)
    listed = set(merges)
    spans: dict[str, tuple[int, int]] = {}  # token -> ranks of its first and last merge
    for rank, (left, right) in enumerate(merges):
        first, _ = spans.get(left + right, (rank, rank))
        spans[left + right] = first, rank
    lacking = {
        text: (text[:cut], text[cut:])
        for text in tokens.ids
        if text not in tokens.added and len(text) <= LONGEST_MERGED
        for cut in range(1, len(text))
        if text[:cut] in tokens.ids and text[cut:] in tokens.ids and (text[:cut], text[cut:]) not in listed
    }
    first = min((tokens.ids[text] for text in spans), default=0)
    for text, (left, right) in lacking.items():
        # Early converters took the score of the first token, 0, for none; 0 is the highest below, too.
        if len(lacking) > 1 or tokens.ids[text] > first:
            problem = f"lacks {left!r}, {right!r}, which SentencePiece would join to {text!r}: ids would differ"
            model.fail("merges", problem)
    scores = np.zeros(len(tokens.texts), np.float32)
    place, last, previous = 0, -1, ""
    for text, (start, stop) in spans.items():  # in the order of their first merges
        if start > last:
            place += 1
        elif len(set(text + previous)) > 1:
            model.fail("merges", f"interleaves those of {previous!r} and {text!r}, which scores cannot say")
        scores[tokens.ids[text]] = -place
        last, previous = max(last, stop), text
    return scores
