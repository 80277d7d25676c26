"""Encodes texts with a GGUF vocabulary, using the `tokenizers` library."""

from __future__ import annotations

import functools
import heapq
import itertools
import re
import string
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from gguf.constants import TokenType
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from jax_q4k import GGUFError

from .pretokenizers import PRE_TOKENIZERS, splitter
from .vocabulary import KEY, GGUFVocabulary, Vocabulary

#: Function that encodes a text without special tokens.
TextEncoder = Callable[[str], list[int]]

SPACE = "\u2581"  # SentencePiece's character for a space

# Far above any real vocabulary; a few megabytes of tokens can have billions of splits.
LONGEST_MERGED = 256  # characters; longer tokens are never formed by merging
MAX_MERGES = 1 << 22


class GGUFEncoder:
    """Encodes texts like llama.cpp, which splits off special tokens first."""

    def __init__(self, vocabulary: GGUFVocabulary) -> None:
        """Checks the vocabulary; raises GGUFError if it is invalid."""
        check(vocabulary)
        self._vocabulary = vocabulary
        # SentencePiece adds a space before a text, and before each part after a special token.
        self._prefix = " " if vocabulary.adds_space else ""

    def __getstate__(self) -> dict[str, Any]:
        """Pickles without the encoder, a function that cannot be pickled."""
        return {name: value for name, value in vars(self).items() if name != "_encode"}

    @functools.cached_property
    def _encode(self) -> TextEncoder:
        """The encoder, built on first use because a large vocabulary takes tenths of a second."""
        return build(self._vocabulary)

    def encode(self, text: str, parse_special: bool, marks: Mapping[str, str]) -> list[int]:
        """Returns the ids of a text; takes the arguments of `Tokenizer.encode`."""
        special = [entry for entry in self._vocabulary.special if parse_special or not entry[2]]
        ids: list[int] = []
        prefix, meanings = self._prefix, str.maketrans(dict(marks))
        for part in cut(text, special, self._vocabulary.stripping_ids):
            if isinstance(part, int):
                ids.append(part)
                prefix = self._prefix
            else:
                ids += self._encode(prefix + part.translate(meanings) if marks else prefix + part)
                prefix = ""
        return ids


def cut(
    text: str, special: Iterable[tuple[str, int, bool]], stripping: Container[int] = ()
) -> list[str | int]:
    """Splits a text at special tokens; returns non-empty text parts and ids.

    As in llama.cpp, tokens are searched in the order of `special`, each in the whole text. White
    space after the tokens in `stripping` is removed.
    """
    parts: list[str | int] = [text] if text else []
    for token, token_id, _ in special:
        if token not in text:
            continue
        cut: list[str | int] = []
        for part in parts:
            if isinstance(part, int) or token not in part:
                cut.append(part)
                continue
            for i, piece in enumerate(part.split(token)):
                if i and token_id in stripping:
                    piece = piece.lstrip(string.whitespace)
                cut += ([token_id] if i else []) + ([piece] if piece else [])
        parts = cut
    return parts


def check(vocabulary: GGUFVocabulary) -> None:
    """Raises GGUFError for a vocabulary that `build` cannot handle; faster than building it."""
    if not vocabulary.raw:
        return
    if len(_byte_ids(vocabulary)) < 256 and vocabulary.unknown_token_id is None:
        problem = "has neither all of '<0x00>' to '<0xFF>' nor an unknown token"
        raise GGUFError(vocabulary.file, KEY + "tokens", problem)
    if vocabulary.model != "llama":
        return
    cuts = sum(len(token) - 1 for token in vocabulary.tokens if len(token) <= LONGEST_MERGED)
    if cuts > MAX_MERGES:  # an upper bound, so counts the splits into two tokens
        splits = _splits(vocabulary, _with_characters(vocabulary))
        if next(itertools.islice(splits, MAX_MERGES, None), None) is not None:
            problem = f"can be split into two other tokens in more than {MAX_MERGES} ways"
            raise GGUFError(vocabulary.file, KEY + "tokens", problem)


def ids_of_text(tokenizer: Tokenizer, text: str) -> list[int]:
    """Returns the ids of a text, computed without the interpreter lock.

    The library's `encode` holds it, for more than a second with a text of a megabyte.
    """
    ids: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
    return ids


def build(vocabulary: GGUFVocabulary) -> TextEncoder:
    """Builds the encoder of a vocabulary that `check` has accepted."""
    if vocabulary.model == "llama":
        return sentencepiece(vocabulary)
    if vocabulary.model in ("bert", "t5"):
        return wordpiece(vocabulary) if vocabulary.model == "bert" else unigram(vocabulary)
    return raw_utf8(vocabulary) if vocabulary.raw else byte_level(vocabulary)


def byte_level(vocabulary: GGUFVocabulary) -> TextEncoder:
    """Builds a byte-level BPE encoder (GPT-2's byte alphabet) with the named pre-tokenizer.

    Bytes without a token are dropped after merging, so their neighbors are not merged, as in
    llama.cpp.
    """
    assert vocabulary.pre is not None
    pre = PRE_TOKENIZERS[vocabulary.pre]
    ids = dict(vocabulary.ids)
    for character in sorted(set(pre_tokenizers.ByteLevel.alphabet()) - ids.keys()):
        ids[character] = len(ids)
    model = models.BPE(vocab=ids, merges=_merges(vocabulary), ignore_merges=pre.ignore_merges)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = splitter(pre)
    count = len(vocabulary.tokens)

    def encode(text: str) -> list[int]:
        found = ids_of_text(tokenizer, text)
        return found if len(ids) == count else [i for i in found if i < count]

    return encode


def raw_utf8(vocabulary: GGUFVocabulary) -> TextEncoder:
    """Builds a BPE encoder with merges of text with SentencePiece's spaces: Gemma 4, Sarvam.

    For Gemma, a run of newlines that is a token is never split, whether or not merges form it.
    """
    assert vocabulary.pre is not None
    pre = PRE_TOKENIZERS[vocabulary.pre]
    (pattern,) = pre.patterns
    parts = re.compile(pattern)
    tokenizer = _with_byte_fallback(vocabulary, vocabulary.ids, _merges(vocabulary))

    def ids_of(part: str) -> list[int]:
        is_run = pre.whole_lines and part.startswith("\n")
        token = vocabulary.ids.get(part) if is_run else None
        if token is not None:
            return [token]
        return ids_of_text(tokenizer, part)

    return lambda text: [
        i for part in parts.findall(text.replace(" ", SPACE)) for i in ids_of(part)
    ]


def sentencepiece(vocabulary: GGUFVocabulary) -> TextEncoder:
    """Builds an encoder for SentencePiece's BPE, by converting its scores to merges.

    SentencePiece first joins the neighbors that form the token with the highest score. The library
    joins pairs by rank, so every split of a token into two becomes a merge with the rank of the
    token's score. The order is the same if scores differ. Among equal scores llama.cpp joins the
    leftmost pair, which ranks cannot express; `_leftmost` handles that. (Llama 2's runs of spaces
    share one score, but both orders result in the same ids.)
    """
    unknown, ids = vocabulary.unknown_token_id, _with_characters(vocabulary)
    byte_ids = _byte_ids(vocabulary)
    has_bytes = len(byte_ids) == 256
    merges = list(_splits(vocabulary, ids))
    if _has_ties(vocabulary, merges):
        return _leftmost(vocabulary, {left + right for left, right in merges})
    tokenizer = _with_byte_fallback(vocabulary, ids, merges)
    unknown_ids = [] if unknown is None else [unknown]
    parts = {
        i: [byte_ids[byte] for byte in text.encode()] if has_bytes else unknown_ids
        for text, i in ids.items()
        if i >= len(vocabulary.tokens)
    }

    def encode(text: str) -> list[int]:
        found = ids_of_text(tokenizer, text.replace(" ", SPACE))
        if not parts:
            return found
        return [part for i in found for part in parts.get(i, (i,))]

    return encode


def wordpiece(vocabulary: GGUFVocabulary) -> TextEncoder:
    """Builds a WordPiece encoder: words are split into the longest tokens from the left.

    Words of more than 100 characters are unknown, as for the models' own tokenizers.
    """
    unknown = vocabulary.unknown_token_id
    special = {i for _, i, _ in vocabulary.special}
    ids = {
        token if i in special else spelled_in_wordpiece(token): i
        for i, token in enumerate(vocabulary.tokens)
    }
    name = "[UNK]" if unknown is None else next(text for text, i in ids.items() if i == unknown)
    tokenizer = Tokenizer(models.WordPiece(vocab=ids, unk_token=name, max_input_chars_per_word=100))
    tokenizer.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=True,
        strip_accents=vocabulary.strip_accents,
        lowercase=vocabulary.lowercase,
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return lambda text: ids_of_text(tokenizer, text)


def spelled_in_wordpiece(token: str) -> str:
    """Returns a token's text in WordPiece vocabularies.

    In GGUF files the beginning of a word is SPACE; in WordPiece's own, other parts begin with ##.
    """
    return token[1:] if token.startswith(SPACE) else f"##{token}"


def unigram(vocabulary: GGUFVocabulary) -> TextEncoder:
    """Builds an encoder for SentencePiece's Unigram, the most likely split of a text."""
    assert vocabulary.scores is not None
    types, scores = vocabulary.types, vocabulary.scores.astype(np.float64)
    in_texts = np.isin(types, (TokenType.NORMAL, TokenType.USER_DEFINED))
    lowest = float(scores[in_texts].min()) if in_texts.any() else 0.0
    # A text has no spaces when it is split, so names with a space are never found in it.
    pieces = [
        (token, score) if found else (f" {i}", lowest)
        for i, (token, score, found) in enumerate(
            zip(vocabulary.tokens, scores.tolist(), in_texts.tolist(), strict=True)
        )
    ]
    tokenizer = Tokenizer(models.Unigram(pieces, vocabulary.unknown_token_id, False))
    charsmap = normalizers.Precompiled(vocabulary.charsmap) if vocabulary.charsmap else None

    def encode(text: str) -> list[int]:
        text = text if charsmap is None else charsmap.normalize_str(text)
        if vocabulary.merges_spaces:
            text = "".join(SPACE + word for word in text.split(" ") if word)
        return ids_of_text(tokenizer, text.replace(" ", SPACE)) if text else []

    return encode


def _has_ties(vocabulary: GGUFVocabulary, merges: list[tuple[str, str]]) -> bool:
    """Returns whether merges form tokens of equal score other than runs of one character."""
    assert vocabulary.scores is not None
    formed = list(dict.fromkeys(left + right for left, right in merges))
    scores = vocabulary.scores[[vocabulary.ids[token] for token in formed]]
    equal = np.flatnonzero(scores[1:] == scores[:-1])
    return any(len(set(formed[i] + formed[i + 1])) > 1 for i in equal.tolist())


def _leftmost(vocabulary: GGUFVocabulary, formed: set[str]) -> TextEncoder:
    """Builds a SentencePiece encoder in Python, which joins the leftmost of equal scores first.

    formed: tokens that merges form.
    """
    assert vocabulary.scores is not None
    costs = {token: -float(vocabulary.scores[vocabulary.ids[token]]) for token in formed}
    byte_ids, unknown = _byte_ids(vocabulary), vocabulary.unknown_token_id
    unknown_ids = [] if unknown is None else [unknown]

    def ids_of(symbol: str) -> list[int]:
        if symbol in vocabulary.ids:
            return [vocabulary.ids[symbol]]
        return [byte_ids[b] for b in symbol.encode()] if len(byte_ids) == 256 else unknown_ids

    def encode(text: str) -> list[int]:
        symbols = list(text.replace(" ", SPACE))
        count = len(symbols)
        previous, next_ = list(range(-1, count - 1)), list(range(1, count + 1))
        pairs: list[tuple[float, int, str]] = []

        def add(left: int, right: int) -> None:
            if left >= 0 and right < count:
                token = symbols[left] + symbols[right]
                if token in costs:
                    heapq.heappush(pairs, (costs[token], left, token))

        for i in range(count - 1):
            add(i, i + 1)
        while pairs:
            _, left, token = heapq.heappop(pairs)
            right = next_[left]
            if not symbols[left] or right >= count or symbols[left] + symbols[right] != token:
                continue  # one of the two was joined with another symbol
            symbols[left], symbols[right] = token, ""
            next_[left] = next_[right]
            if next_[left] < count:
                previous[next_[left]] = left
            add(previous[left], left)
            add(left, next_[left])
        return [i for symbol in symbols if symbol for i in ids_of(symbol)]

    return encode


def _with_byte_fallback(
    vocabulary: Vocabulary, ids: dict[str, int], merges: list[tuple[str, str]]
) -> Tokenizer:
    """Builds BPE that encodes characters without a token as bytes, or as the unknown token."""
    unknown = vocabulary.unknown_token_id
    model = models.BPE(
        vocab=ids,
        merges=merges,
        byte_fallback=len(_byte_ids(vocabulary)) == 256,
        unk_token=None if unknown is None else vocabulary.tokens[unknown],
    )
    return Tokenizer(model)


def _merges(vocabulary: GGUFVocabulary) -> list[tuple[str, str]]:
    """Returns the file's merges without duplicates; keeps the first of two, like llama.cpp."""
    return list(dict.fromkeys(vocabulary.merges))


def _byte_ids(vocabulary: Vocabulary) -> list[int]:
    """Returns the ids of the byte tokens in the vocabulary, ordered by byte."""
    return [i for byte in range(256) if (i := vocabulary.ids.get(f"<0x{byte:02X}>")) is not None]


def _with_characters(vocabulary: Vocabulary) -> dict[str, int]:
    """Returns token -> id, with new ids for characters that occur only in longer tokens.

    Merges need a token for every character.
    """
    ids = dict(vocabulary.ids)
    for character in sorted(set().union(*vocabulary.tokens) - ids.keys()):
        ids[character] = len(ids)
    return ids


def _splits(vocabulary: GGUFVocabulary, ids: dict[str, int]) -> Iterator[tuple[str, str]]:
    """Yields every split of a token into two tokens of `ids`, by descending score of the token."""
    assert vocabulary.scores is not None
    for i in np.argsort(-vocabulary.scores, kind="stable").tolist():
        token = vocabulary.tokens[i]
        if len(token) <= LONGEST_MERGED:
            for cut in range(1, len(token)):
                if token[:cut] in ids and token[cut:] in ids:
                    yield token[:cut], token[cut:]
