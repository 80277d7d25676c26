"""Defines tokenizer vocabularies, and reads and checks a GGUF file's vocabulary."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from gguf.constants import TokenType

from jax_q4k.gguf import Fields

from ..support.warn import warn
from .pretokenizers import PRE_TOKENIZERS
from .special_tokens import classify

NO_VOCABULARY = ("no_vocab", "none")
KEY = "tokenizer.ggml."
#: Substrings of `general.name` of models whose special tokens strip white space after them, and
#: special tokens that do not.
PHI_3_NAMES = ("phi-3", "phi3")
PHI_3_KEEPS = ("<unk>", "<s>", "<|endoftext|>")
#: Transformers' name of a special token -> GGUF key (with its spelling); used only by chat
#: templates.
SPECIAL_TOKENS = {
    "pad_token": "padding_token_id",
    "sep_token": "seperator_token_id",
    "mask_token": "mask_token_id",
    "cls_token": "cls_token_id",
}
#: `tokenizer.ggml.model` -> what it is.
MODELS = {
    "llama": "SentencePiece's BPE",
    "gpt2": "byte-level BPE",
    "gemma4": "BPE of raw UTF-8",
    "bert": "WordPiece",
    "t5": "SentencePiece's Unigram",
}
#: Pre-tokenizers of RoBERTa's family, whose pairs have a separator.
_SEPARATING = ("jina-v1-en", "jina-v2-code", "roberta-bpe")
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """A tokenizer's checked vocabulary, independent of the encoder.

    Attributes:
      tokens: texts of the tokens, by id.
      ids: text -> id.
      types: int32 (vocab,), TokenType.
      raw: tokens are UTF-8 with SentencePiece's spaces, not spelled in GPT-2's byte alphabet.
      adds_space: encoding adds a space before a text.
      bos_token_id, eos_token_id, unknown_token_id: None if the file has none.
      eos_token_ids: all ids that end generation, ascending.
      before, after: ids added before and after a text.
      between: ids added between the texts of a pair, such as a query and a document.
      special_ids: name of a special token in chat templates -> id.
      chat_templates: name -> template; the file's own is "default".
      file: name of the file in error messages.
    """

    tokens: tuple[str, ...]
    ids: dict[str, int]
    types: np.ndarray
    raw: bool
    adds_space: bool
    bos_token_id: int | None
    eos_token_id: int | None
    unknown_token_id: int | None
    eos_token_ids: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]
    special_ids: dict[str, int]
    chat_templates: dict[str, str]
    file: str
    between: tuple[int, ...] = ()

    @functools.cached_property
    def special(self) -> list[tuple[str, int, bool]]:
        """Special tokens as (text, id, whether it needs parse_special), longest text first."""
        kinds: dict[int, bool] = {
            TokenType.CONTROL: True,
            TokenType.UNKNOWN: True,
            TokenType.USER_DEFINED: False,
        }
        types = self.types.tolist()
        special = [
            (token, i, kinds[kind])
            for i, (token, kind) in enumerate(zip(self.tokens, types, strict=True))
            if kind in kinds
        ]
        return sorted(special, key=lambda entry: (-len(entry[0].encode()), entry[1]))


@dataclass(frozen=True, kw_only=True)
class GGUFVocabulary(Vocabulary):
    """Vocabulary of a GGUF file, with the data that encoders need.

    Defaults of missing keys are llama.cpp's, except that byte-level BPE has no BOS and EOS unless
    the file names them (llama.cpp then uses id 11, a comma in most vocabularies).

    Attributes:
      model: one of MODELS.
      scores: float32 (vocab,), SentencePiece only.
      merges: by rank, BPE only.
      pre: name of the pre-tokenizer, BPE only.
      stripping_ids: special tokens that strip the white space after them.
      lowercase, strip_accents: changes of texts before WordPiece.
      merges_spaces: runs of spaces count as one, Unigram only.
      charsmap: SentencePiece's compiled normalization of characters, Unigram only; empty: none.
    """

    model: str
    scores: np.ndarray | None
    merges: tuple[tuple[str, str], ...]
    pre: str | None
    stripping_ids: frozenset[int]
    lowercase: bool = True
    strip_accents: bool = True
    merges_spaces: bool = False
    charsmap: bytes = b""

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any], file: str) -> GGUFVocabulary:
        """Reads a vocabulary; raises `GGUFError` that names `file` and the invalid key."""
        return _Reader(Fields(metadata, file)).vocabulary()


def chat_templates(fields: Fields) -> dict[str, str]:
    """Returns name -> template: GGUF's unnamed template as "default", and the named ones."""
    key, found = "tokenizer.chat_template", {}
    default = fields.string(key, None)
    if default is not None:
        found["default"] = default
    if "tokenizer.chat_templates" in fields:
        for name in fields.strings("tokenizer.chat_templates"):
            if name != "default" or name not in found:
                found[name] = fields.string(f"{key}.{name}")
    return found


#: `tokenizer.ggml.model` -> ids of special tokens in files that do not name them.
_DEFAULT_IDS: dict[str, dict[str, int]] = {
    "llama": {"bos": 1, "eos": 2, "unknown": 0},
    "bert": {"bos": 101, "sep": 102, "unknown": 100},
    "t5": {"eos": 1, "unknown": 2},
}
#: Token that llama.cpp adds at either end if the id in a byte-level file is beyond the vocabulary.
_BYTE_LEVEL_ID = 11


class _Reader:
    """Reads and checks the `tokenizer.*` keys of GGUF metadata."""

    def __init__(self, fields: Fields) -> None:
        self.fields = fields.under(KEY)
        self.chat_templates = chat_templates(fields)
        self.name = fields.string("general.name", "").lower()
        self.reported: set[str] = set()  # keys of ids that were warned of

    def vocabulary(self) -> GGUFVocabulary:
        fields = self.fields
        model = fields.string("model", None)
        if model not in MODELS:
            found = "is missing" if model is None else f"is {model!r}"
            supported = ", ".join(f"{name!r} ({kind})" for name, kind in MODELS.items())
            fields.fail("model", f"{found}; supported: {supported}")
        spm, words, unigram = (model == name for name in ("llama", "bert", "t5"))
        pre = {"gpt2": self.pre_tokenizer, "gemma4": lambda: "gemma4"}.get(model, lambda: None)()
        tokens, ids = self.tokens()
        count = len(tokens)

        add_bos = fields.boolean(
            "add_bos_token", PRE_TOKENIZERS[pre].add_bos if pre else not unigram
        )
        if pre == "gemma4" or words:  # early files say false, but the models need it
            add_bos = True
        add_eos = not words and fields.boolean("add_eos_token", unigram)
        defaults = dict(_DEFAULT_IDS.get(model, {}))
        for wanted, name in ((add_bos, "bos"), (add_eos, "eos")):
            if model == "gpt2" and wanted and fields.integer(f"{name}_token_id", None) is not None:
                defaults[name] = _BYTE_LEVEL_ID
        if words and fields.integer("bos_token_id", None) is None:
            bos = self.token_id("cls_token_id", count, defaults["bos"])
        else:
            bos = self.token_id("bos_token_id", count, defaults.get("bos"))
        eos = self.token_id("eos_token_id", count, defaults.get("eos"))
        sep = self.token_id("seperator_token_id", count, defaults.get("sep")) if words else None
        for wanted, name, token in ((add_bos, "bos", bos), (add_eos, "eos", eos)):
            if wanted and token is None:
                problem = f"is missing, but add_{name}_token asks for one in every text"
                fields.fail(f"{name}_token_id", problem)

        keys = eos, *(self.token_id(f"{name}_token_id", count) for name in ("eot", "eom"))
        own_ends = [token for token in keys if token is not None]
        ends, overruled = classify(ids, lambda key: self.token_id(key, count), own_ends)
        unknown = self.token_id("unknown_token_id", count, defaults.get("unknown"))
        others = {name: fields.integer(key, None) for name, key in SPECIAL_TOKENS.items()}
        special = {"bos_token": bos, "eos_token": eos, "unk_token": unknown, **others}
        # Some files have padding ids beyond the vocabulary; ignored, as in llama.cpp.
        named = {name: i for name, i in special.items() if i is not None and 0 <= i < count}
        types = self.types(tokens)
        types[list(overruled)] = list(overruled.values())
        adds_space = words or fields.boolean("add_space_prefix", spm)
        after = (eos,) if add_eos and eos is not None else ()
        add_sep = fields.boolean("add_sep_token", pre in _SEPARATING)
        separator = named.get("sep_token") if add_sep else None
        between = (*after, *(() if separator is None else (separator,)))
        if pre == "modern-bert":  # its files ask for two, but the model was trained with one
            between = after
        if words:
            after = between = () if sep is None else (sep,)
        lowercase = fields.boolean("normalizer.lowercase", True)
        return GGUFVocabulary(
            model=model,
            tokens=tokens,
            ids=ids,
            types=types,
            scores=self.scores(count) if spm or unigram else None,
            merges=self.merges(ids) if pre else (),
            pre=pre,
            bos_token_id=bos,
            eos_token_id=eos,
            unknown_token_id=unknown,
            eos_token_ids=ends,
            raw=pre is None or PRE_TOKENIZERS[pre].raw,
            adds_space=adds_space and pre is None,
            before=(bos,) if add_bos and bos is not None else (),
            after=after,
            between=between,
            lowercase=lowercase,
            strip_accents=fields.boolean("normalizer.strip_accents", lowercase),
            merges_spaces=unigram and fields.boolean("remove_extra_whitespaces", False),
            charsmap=self.charsmap() if unigram else b"",
            stripping_ids=self.stripping_ids(tokens, types),
            special_ids=named,
            chat_templates=self.chat_templates,
            file=fields.file,
        )

    def charsmap(self) -> bytes:
        """Reads SentencePiece's compiled normalization; empty if the file has none."""
        values = self.fields.numbers("precompiled_charsmap", np.int64, None)
        if values is None:
            return b""
        if ((values < -128) | (values > 255)).any():
            self.fields.fail("precompiled_charsmap", "must hold bytes")
        return (values & 255).astype(np.uint8).tobytes()

    def token_id(self, name: str, count: int, default: int | None = None) -> int | None:
        """Reads an id below `count`, the vocabulary size; ignores a default beyond it.

        Another id warns and counts as missing, as in llama.cpp.
        """
        token = self.fields.integer(name, None)
        if token is not None and 0 <= token < count:
            return token
        default = default if default is not None and default < count else None
        if token is not None and name not in self.reported:
            self.reported.add(name)
            instead = "no token is" if default is None else f"token {default} is"
            problem = f"is {token}, but the vocabulary has {count} tokens: {instead} used"
            warn(f"{self.fields.file}: {self.fields.prefix}{name} {problem}")
        return default

    def tokens(self) -> tuple[tuple[str, ...], dict[str, int]]:
        """Reads the tokens' texts; also returns text -> id."""
        texts = self.fields.strings("tokens")
        if not texts:
            self.fields.fail("tokens", "is empty")
        # Some files pad with empty texts; each gets a unique name, as in llama.cpp.
        tokens = tuple(text or f"[EMPTY_{i}]" for i, text in enumerate(texts))
        ids: dict[str, int] = {}
        for i, token in enumerate(tokens):
            if ids.setdefault(token, i) != i:
                problem = f"holds {token!r} twice, as ids {ids[token]} and {i}"
                self.fields.fail("tokens", problem)
        return tokens, ids

    def types(self, tokens: tuple[str, ...]) -> np.ndarray:
        """Reads token types, int32 (vocab,); NORMAL if the file has none."""
        types = self.per_token("token_type", np.int64, len(tokens))
        if types is None:
            return np.full(len(tokens), TokenType.NORMAL, np.int32)
        for i in np.flatnonzero((types < 0) | (types > max(TokenType))):  # 0: undefined
            problem = f"is {types[i]} for id {i}, expected 0 to {max(TokenType)}"
            self.fields.fail("token_type", problem)
        for i in np.flatnonzero(types == TokenType.BYTE):
            if not BYTE_TOKEN.fullmatch(tokens[i]):
                problem = f"id {i}, a byte token, is {tokens[i]!r}, expected '<0x00>' to '<0xFF>'"
                self.fields.fail("tokens", problem)
        return types.astype(np.int32)

    def stripping_ids(self, tokens: tuple[str, ...], types: np.ndarray) -> frozenset[int]:
        """Returns Phi-3's special tokens except three; recognizes Phi-3 by name, like llama.cpp."""
        if not any(name in self.name for name in PHI_3_NAMES):
            return frozenset()
        special = np.isin(types, (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED))
        special_ids = np.flatnonzero(special).tolist()
        return frozenset(i for i in special_ids if tokens[i] not in PHI_3_KEEPS)

    def scores(self, count: int) -> np.ndarray:
        """Reads token scores, float32 (vocab,)."""
        scores = self.per_token("scores", np.float32, count)
        if scores is None:
            problem = "is missing, but SentencePiece merges by it"
            self.fields.fail("scores", problem)
        if np.isnan(scores).any():
            problem = f"is NaN for id {int(np.flatnonzero(np.isnan(scores))[0])}"
            self.fields.fail("scores", problem)
        return scores

    def per_token(self, name: str, dtype: type[np.generic], count: int) -> np.ndarray | None:
        """Reads one number per token, (count,) of `dtype`; None if the key is missing."""
        values = self.fields.numbers(name, dtype, None)
        if values is not None and len(values) != count:
            problem = f"has {len(values)} entries, expected one for each of the {count} tokens"
            self.fields.fail(name, problem)
        return values

    def merges(self, ids: dict[str, int]) -> tuple[tuple[str, str], ...]:
        """Reads the two tokens of every merge, by rank."""
        pairs = []
        for rank, merge in enumerate(self.fields.strings("merges")):
            left, _, right = merge.partition(" ")
            if not (left in ids and right in ids and left + right in ids):
                problem = f"entry {rank} is {merge!r}, expected two tokens that form a third"
                self.fields.fail("merges", problem)
            pairs.append((left, right))
        return tuple(pairs)

    def pre_tokenizer(self) -> str:
        """Reads the name of the pre-tokenizer."""
        pre = self.fields.string("pre", "default")
        if pre not in PRE_TOKENIZERS:
            supported = ", ".join(sorted(PRE_TOKENIZERS))
            self.fields.fail("pre", f"is {pre!r}, which is unknown; supported: {supported}")
        return pre
