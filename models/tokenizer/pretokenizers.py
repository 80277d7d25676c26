r"""Pre-tokenizers of byte-level BPE, which split a text before merging: `tokenizer.ggml.pre`.

Each name stands for the split patterns of a published tokenizer.json, applied one after the other.
Matches and the text between them are merged apart. Patterns are those of llama.cpp
(`llm_tokenizer_bpe`), which spells case-blind contractions out so that only ASCII letters fold.
`tekken` is the exception: llama.cpp approximates its letter classes (`\p{Lu}` and so on), which the
regex engine here has, so the model's own pattern is used.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers


@dataclass(frozen=True)
class PreTokenizer:
    """Split patterns (Oniguruma syntax) and the defaults that go with the name.

    ignore_merges: a match that is a token stays whole, whether or not merges lead to it.
    add_bos: whether a BOS is prepended where the file has no `add_bos_token`.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


_CONTRACTION = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _tiktoken(
    letters: str = r"\p{L}", digits: str = r"\p{N}", symbols: str = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
) -> str:
    r"""The pattern of the tiktoken line, cl100k and its relatives.

    Its members differ in `letters` and `digits`.
    """
    return rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?{letters}+|{digits}|{symbols}|{_SPACES}"


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = _tiktoken(digits=r"\p{N}{1,3}")
_QWEN2 = _tiktoken()

_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)

_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    r"[一-龥\u3040-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥\u0800-一가-\ud7ff]+", r"\p{N}")

_FAMILIES: tuple[tuple[tuple[str, ...], PreTokenizer], ...] = (
    (
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
        PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True),
    ),
    (("smaug-bpe", "dbrx"), PreTokenizer((_LLAMA3,))),
    (("minicpm5",), PreTokenizer((r"\p{N}{1,3}", _tiktoken(digits=r"\p{N}+")), ignore_merges=True)),
    (("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2"), PreTokenizer((_QWEN2,))),
    (
        ("qwen35",),
        PreTokenizer(
            (_tiktoken(letters=r"[\p{L}\p{M}]", symbols=r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"),)
        ),
    ),
    (("seed-coder",), PreTokenizer((_tiktoken(symbols=r" ?[^\s\p{L}\p{N}\r\n]+"),))),
    (("tekken",), PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True)),
    (
        ("gpt-2", "phi-2", "mellum", "a.x-4.0", "gigachat", "trillion", "exaone4", "olmo", "mpt"),
        PreTokenizer((_GPT2,)),
    ),
    (
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
        PreTokenizer((r"\p{N}", _GPT2)),
    ),
    (("deepseek-coder",), PreTokenizer(_DEEPSEEK_CODER)),
    (("deepseek-v3",), PreTokenizer(_DEEPSEEK_V3)),
    (("viking",), PreTokenizer((r" ?[^(\s|.,!?…。，、।۔،)]+", r"\p{N}"))),
    (("default",), PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))),
)


def splitter(pre: PreTokenizer) -> pre_tokenizers.PreTokenizer:
    """Splits a text, and spells its parts in GPT-2's byte alphabet."""
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in pre.patterns]
    byte_alphabet = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*splits, byte_alphabet])


PRE_TOKENIZERS: dict[str, PreTokenizer] = {name: pre for names, pre in _FAMILIES for name in names}


def by_patterns(patterns: tuple[str, ...], ignore_merges: bool) -> str | None:
    """The name of split patterns that are spelled as in published tokenizer.json files, or None.

    Those files write case-blind contractions with `(?i:...)`, which folds U+017F to s too.
    """
    spelled = tuple(
        pattern.replace(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)", _CONTRACTION) for pattern in patterns
    )
    for name, pre in PRE_TOKENIZERS.items():
        if (pre.patterns, pre.ignore_merges) == (spelled, ignore_merges):
            return name
    return None
