r"""Defines pre-tokenizers of byte-level BPE (`tokenizer.ggml.pre`), which split text before merges.

Each name stands for the split patterns of a published tokenizer.json, applied in sequence. Merges
do not cross the borders of matches. Patterns are those of llama.cpp (`llm_tokenizer_bpe`), which
spells out case-insensitive contractions so that only ASCII letters fold. The exceptions are
`tekken`, `gpt-4o` and `kimi-k2`: llama.cpp approximates their letter classes (`\p{Lu}` and so on),
but the regex engine here supports them, so the models' own patterns are used.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers


@dataclass(frozen=True)
class PreTokenizer:
    """A pre-tokenizer's split patterns (Oniguruma syntax), and defaults that its name implies.

    ignore_merges: a match that is a token is never split, whether or not merges form it.
    add_bos: whether BOS is prepended if the file has no `add_bos_token`.
    raw: matches are merged as UTF-8 with SentencePiece's spaces and byte tokens, not in GPT-2's
      byte alphabet.
    whole_lines: with `raw`, a run of newlines that is a token is never split.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    raw: bool = False
    whole_lines: bool = False


_CONTRACTION = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _tiktoken(
    letters: str = r"\p{L}",
    digits: str = r"\p{N}",
    symbols: str = r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    spaces: str = _SPACES,
    contraction: str = f"{_CONTRACTION}|",
) -> str:
    r"""Returns a pattern of the cl100k family of tiktoken, whose members differ in one part."""
    return rf"{contraction}[^\r\n\p{{L}}\p{{N}}]?{letters}+|{digits}|{symbols}|{spaces}"


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = _tiktoken(digits=r"\p{N}{1,3}")
_QWEN2 = _tiktoken()

_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"


def _by_case(digits: str, suffix: str = "", ends: str = r"[\r\n/]*", without: str = "") -> str:
    r"""Returns a pattern of the o200k family, in which a capital begins a word.

    suffix: optional end of a word. ends: optional end of symbols. without: condition on letters, in
    the syntax of character classes.
    """
    before, upper, lower = r"[^\r\n\p{L}\p{N}]?", f"[{_UPPER}{without}]", f"[{_LOWER}{without}]"
    words = rf"{before}{upper}*{lower}+{suffix}|{before}{upper}+{lower}*{suffix}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+{ends}|{_SPACES}"


_TEKKEN = _by_case(r"\p{N}")
_O200K = _by_case(r"\p{N}{1,3}", suffix=_CONTRACTION + "?")
_KIMI = r"\p{Han}+|" + _by_case(
    r"\p{N}{1,3}", _CONTRACTION + "?", ends=r"[\r\n]*", without=r"&&[^\p{Han}]"
)

# Letters with case, as listed by the publisher.
_CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1"
    "\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd"
    "\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d"
    "\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    "\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec"
    "\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b"
    "\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787"
    "\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2"
    "\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_EAST_ASIAN = "[一-龥\u0800-一가-\ud7ff]+"
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_CASED}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    _EAST_ASIAN,
    r"\p{N}+",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, r"\p{N}")
_CHINESE_JAPANESE = "[一-龥\u3040-ゟ゠-ヿ]+"


def _by_symbols(ends: str) -> str:
    r"""Returns the last pattern of the DeepSeek V3 family: a symbol begins a word of ASCII letters.

    ends: optional end of symbols, and white space.
    """
    return (
        r'[!"#$%&'
        r"'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        rf"| ?[\p{{P}}\p{{S}}]+{ends}"
    )


_V3_WORDS = _by_symbols(rf"[\r\n]*|{_SPACES}")
_DEEPSEEK_V3 = (r"\p{N}{1,3}", _CHINESE_JAPANESE, _V3_WORDS)
_SPARK = (
    r"\p{N}{1,3}",
    _CHINESE_JAPANESE,
    _by_symbols(r"|[\r\n]|\s+(?!\S)|\s+"),
    r"\p{N}",
)
_AFMOE = (
    r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))",  # threes from the end of a number
    "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf"
    "\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af"
    "\u1100-\u11ff]+",
    _V3_WORDS,
)
_YOUTU = (
    "[\uac00-\ud7a3\u3131-\u318e]+"
    "|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
    f"|[\u3105-\u312f]+|{_CHINESE_JAPANESE}",
    _by_case(r"\p{N}", suffix=_CONTRACTION + "?"),
)
_CHAMELEON = (
    "<sentinel:[0-9]+>",
    "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
    r"([\t\n]|    |  )",
    r"\p{N}",
    r"[\p{P}!-/:-@\[-`{-~]",
    _GPT2,
)
_EXAONE = _tiktoken(
    letters=r"(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)",
    symbols=r" ?[^\s\p{L}\p{N}]+[\r\n/]?",
    spaces=r"\s*[\r\n]|\s+(?!\S)|\s+",
)
#: Splits runs of spaces into powers of two.
_JAIS_SPACES = "|".join(rf"\s{{{2**i}}}(?!\S)" for i in range(9, 1, -1))
_JAIS = _tiktoken(
    digits=r"\p{N}{1,3}", spaces=rf"\s*[\r\n]+|{_JAIS_SPACES}|\s{{1,2}}(?!\S)|\s{{1}}"
)
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"

_LINES = r"[^\n]+|\n+"

_FAMILIES: tuple[tuple[tuple[str, ...], PreTokenizer], ...] = (
    (
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
        PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True),
    ),
    (("smaug-bpe", "dbrx", "chatglm-bpe"), PreTokenizer((_LLAMA3,))),
    (("glm4", "glm5"), PreTokenizer((_LLAMA3,), ignore_merges=True)),
    (("minicpm5",), PreTokenizer((r"\p{N}{1,3}", _tiktoken(digits=r"\p{N}+")), ignore_merges=True)),
    (
        ("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2", "kormo", "f2llmv2", "hunyuan")
        + ("solar-open", "grok-2"),
        PreTokenizer((_QWEN2,)),
    ),
    (
        ("qwen35",),
        PreTokenizer(
            (_tiktoken(letters=r"[\p{L}\p{M}]", symbols=r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"),)
        ),
    ),
    (("seed-coder",), PreTokenizer((_tiktoken(symbols=r" ?[^\s\p{L}\p{N}\r\n]+"),))),
    (("tekken",), PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True)),
    (("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), PreTokenizer((_O200K,))),
    (("tiny_aya", "cohere2moe"), PreTokenizer((r"\d{1,3}(?=(?:\d{3})*\b)", _O200K))),
    (
        ("gpt-2", "phi-2", "mellum", "a.x-4.0", "gigachat", "trillion", "exaone4", "olmo", "mpt")
        + ("jais", "granite-docling", "modern-bert", "jina-es", "jina-de", "jina-v2-es")
        + ("jina-v2-de", "jina-v1-en", "jina-v2-code", "roberta-bpe"),
        PreTokenizer((_GPT2,)),
    ),
    (
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
        + ("mellum2",),
        PreTokenizer((r"\p{N}", _GPT2)),
    ),
    (("deepseek-coder",), PreTokenizer(_DEEPSEEK_CODER)),
    (("deepseek-llm",), PreTokenizer(_DEEPSEEK_LLM)),
    (("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), PreTokenizer(_DEEPSEEK_V3)),
    (("bloom", "poro-chat", "gpt3-finnish"), PreTokenizer((_BLOOM,))),
    (("viking",), PreTokenizer((_BLOOM, r"\p{N}"))),
    (("falcon",), PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]"))),
    (("default",), PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))),
    (("gemma4",), PreTokenizer((_LINES,), add_bos=True, raw=True, whole_lines=True)),
    (("sarvam-moe",), PreTokenizer((_LINES,), raw=True)),
    (
        ("bailingmoe", "bailingmoe2", "llada-moe"),
        PreTokenizer((_tiktoken(spaces=r"\s*[\r\n]|\s+(?!\S)|\s+"),)),
    ),
    (("kimi-k2",), PreTokenizer((_KIMI,))),
    (("exaone-moe",), PreTokenizer((_EXAONE,))),
    (("afmoe",), PreTokenizer(_AFMOE)),
    (("laguna",), PreTokenizer((_LINES, _QWEN2))),
    (("superbpe",), PreTokenizer((r"\p{N}+", r"(?=(\d{3})+(?!\d))"))),
    (("youtu",), PreTokenizer(_YOUTU, ignore_merges=True)),
    (("spark2_5",), PreTokenizer(_SPARK)),
    (("chameleon",), PreTokenizer(_CHAMELEON, add_bos=True)),
    (("jais-2",), PreTokenizer((_JAIS,))),
    (("ufakzeka",), PreTokenizer((_tiktoken(contraction=""),))),
)


def splitter(pre: PreTokenizer) -> pre_tokenizers.PreTokenizer:
    """Builds a pre-tokenizer that splits a text and writes bytes in GPT-2's byte alphabet."""
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in pre.patterns]
    byte_alphabet = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*splits, byte_alphabet])


PRE_TOKENIZERS: dict[str, PreTokenizer] = {name: pre for names, pre in _FAMILIES for name in names}


def by_patterns(patterns: tuple[str, ...], ignore_merges: bool) -> str | None:
    """Returns the pre-tokenizer's name for split patterns of a tokenizer.json; None if unknown.

    Published files write case-insensitive contractions as `(?i:...)`, which also folds U+017F to s,
    and some contain literal newlines instead of escapes.
    """
    spellings = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)", _CONTRACTION), ("\r", r"\r"), ("\n", r"\n")
    for published, spelled in spellings:
        patterns = tuple(pattern.replace(published, spelled) for pattern in patterns)
    for name, pre in PRE_TOKENIZERS.items():
        if not pre.raw and (pre.patterns, pre.ignore_merges) == (patterns, ignore_merges):
            return name
    return None
