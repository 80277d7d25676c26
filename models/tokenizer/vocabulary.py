"""What a GGUF file says about its tokenizer, checked."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
from gguf.constants import TokenType

from jax_q4k import GGUFError

from .pretokenizers import PRE_TOKENIZERS
from .special_tokens import classify

NO_VOCABULARY = ("no_vocab", "none")
KEY = "tokenizer.ggml."
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True)
class Vocabulary:
    """A checked vocabulary. Defaults of missing keys are llama.cpp's, except that byte-level BPE
    has no BOS and EOS unless the file names them (llama.cpp then takes id 11, a comma in most
    vocabularies).
    """

    model: str  # "llama" (SentencePiece) or "gpt2" (byte-level BPE)
    tokens: tuple[str, ...]
    ids: dict[str, int]  # token text -> id
    types: np.ndarray  # int32 (vocab,), TokenType
    scores: np.ndarray | None  # float32 (vocab,), SentencePiece only
    merges: tuple[tuple[str, str], ...]  # by rank, byte-level BPE only
    pre: str | None  # pre-tokenizer's name, byte-level BPE only
    bos_token_id: int | None
    eos_token_id: int | None
    unknown_token_id: int | None
    eos_token_ids: tuple[int, ...]  # every id that ends generation, ascending
    add_bos: bool
    add_eos: bool
    add_space_prefix: bool
    chat_template: str | None
    file: str

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any], file: str) -> Vocabulary:
        """Raises `GGUFError` naming `file` and the key at fault."""
        return _Reader(metadata, file).vocabulary()


class _Reader:
    def __init__(self, metadata: Mapping[str, Any], file: str) -> None:
        self.metadata = metadata
        self.file = file

    def vocabulary(self) -> Vocabulary:
        model = self.value("model", str, None)
        if model not in ("llama", "gpt2"):
            found = "is missing" if model is None else f"is {model!r}"
            self.fail(
                "model",
                f"{found}; supported are 'llama' (SentencePiece) and 'gpt2' (byte-level BPE)",
            )
        spm = model == "llama"
        pre = None if spm else self.pre_tokenizer()
        tokens, ids = self.tokens()
        count = len(tokens)

        bos = self.token_id("bos_token_id", count, default=1 if spm else None)
        eos = self.token_id("eos_token_id", count, default=2 if spm else None)
        add_bos = self.value("add_bos_token", bool, PRE_TOKENIZERS[pre].add_bos if pre else True)
        add_eos = self.value("add_eos_token", bool, False)
        for wanted, name, token in ((add_bos, "bos", bos), (add_eos, "eos", eos)):
            if wanted and token is None:
                self.fail(
                    f"{name}_token_id",
                    f"is missing, but every text is to have one (add_{name}_token)",
                )

        ends, control = classify(ids, lambda key: self.token_id(key, count), eos)
        types = self.types(tokens)
        types[control] = TokenType.CONTROL
        return Vocabulary(
            model=model,
            tokens=tokens,
            ids=ids,
            types=types,
            scores=self.scores(count) if spm else None,
            merges=() if spm else self.merges(ids),
            pre=pre,
            bos_token_id=bos,
            eos_token_id=eos,
            unknown_token_id=self.token_id("unknown_token_id", count, default=0 if spm else None),
            eos_token_ids=ends,
            add_bos=add_bos,
            add_eos=add_eos,
            add_space_prefix=self.value("add_space_prefix", bool, spm),
            chat_template=self.value("chat_template", str, None, prefix="tokenizer."),
            file=self.file,
        )

    def fail(self, name: str, problem: str, prefix: str = KEY) -> NoReturn:
        raise GGUFError(self.file, prefix + name, problem)

    def value(self, name: str, kind: type, default: Any, prefix: str = KEY) -> Any:
        value = self.metadata.get(prefix + name)
        if value is None:
            return default
        value = value.item() if isinstance(value, np.generic) else value
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            self.fail(name, f"is of type {type(value).__name__}, expected {kind.__name__}", prefix)
        return value

    def strings(self, name: str) -> list[str]:
        values = self.metadata.get(KEY + name)
        if values is None:
            self.fail(name, "is missing")
        if not isinstance(values, list | tuple) or not all(
            isinstance(value, str) for value in values
        ):
            self.fail(name, "is not an array of strings")
        return list(values)

    def numbers(self, name: str, dtype: type, count: int) -> np.ndarray | None:
        values = self.metadata.get(KEY + name)
        if values is None:
            return None
        array = np.asarray(values)
        kinds = "fiu" if np.issubdtype(dtype, np.floating) else "iu"
        if array.ndim != 1 or (array.dtype.kind not in kinds and array.size):
            self.fail(name, f"is not an array of {'numbers' if 'f' in kinds else 'integers'}")
        if len(array) != count:
            self.fail(
                name, f"has {len(array)} entries, expected one for each of the {count} tokens"
            )
        return array.astype(dtype)

    def token_id(self, name: str, count: int, default: int | None = None) -> int | None:
        token = self.value(name, int, None)
        if token is None:
            return default if default is not None and default < count else None
        if not 0 <= token < count:
            self.fail(name, f"is {token}, expected an id below the vocabulary's size, {count}")
        return token

    def tokens(self) -> tuple[tuple[str, ...], dict[str, int]]:
        texts = self.strings("tokens")
        if not texts:
            self.fail("tokens", "is empty")
        # Some files pad with empty texts; as in llama.cpp each gets a name of its own.
        tokens = tuple(text or f"[EMPTY_{i}]" for i, text in enumerate(texts))
        ids: dict[str, int] = {}
        for i, token in enumerate(tokens):
            if ids.setdefault(token, i) != i:
                self.fail("tokens", f"holds {token!r} twice, as ids {ids[token]} and {i}")
        return tokens, ids

    def types(self, tokens: tuple[str, ...]) -> np.ndarray:
        types = self.numbers("token_type", np.int64, len(tokens))
        if types is None:
            return np.full(len(tokens), TokenType.NORMAL, np.int32)
        for i in np.flatnonzero((types < 0) | (types > max(TokenType))):  # 0: undefined
            self.fail("token_type", f"is {types[i]} for id {i}, expected 0 to {max(TokenType)}")
        for i in np.flatnonzero(types == TokenType.BYTE):
            if not BYTE_TOKEN.fullmatch(tokens[i]):
                self.fail(
                    "tokens",
                    f"id {i}, a byte token, is {tokens[i]!r}, expected '<0x00>' to '<0xFF>'",
                )
        return types.astype(np.int32)

    def scores(self, count: int) -> np.ndarray:
        scores = self.numbers("scores", np.float32, count)
        if scores is None:
            self.fail("scores", "is missing, but a SentencePiece vocabulary merges by it")
        if np.isnan(scores).any():
            self.fail("scores", f"is NaN for id {int(np.flatnonzero(np.isnan(scores))[0])}")
        return scores

    def merges(self, ids: dict[str, int]) -> tuple[tuple[str, str], ...]:
        pairs = []
        for rank, merge in enumerate(self.strings("merges")):
            left, _, right = merge.partition(" ")
            if not (left in ids and right in ids and left + right in ids):
                self.fail(
                    "merges", f"entry {rank} is {merge!r}, expected two tokens that form a third"
                )
            pairs.append((left, right))
        return tuple(pairs)

    def pre_tokenizer(self) -> str:
        pre = self.value("pre", str, "default")
        if pre not in PRE_TOKENIZERS:
            self.fail(
                "pre",
                f"is {pre!r}, which is unknown; supported are {', '.join(sorted(PRE_TOKENIZERS))}",
            )
        return pre
