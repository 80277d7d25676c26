"""Tokenizers: llama.cpp's ids, an independent SentencePiece merge, and malformed metadata."""

from __future__ import annotations

import json
import pickle
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.paths import GOLDEN
from tokenizers import pre_tokenizers

import jax_q4k as jq
from jax_q4k.models import tokenizer
from jax_q4k.models.tokenizer import encoders
from jax_q4k.models.tokenizer.pretokenizers import PRE_TOKENIZERS, splitter

VOCABULARIES = GOLDEN.parent / "tokenizers"
#: Complete vocabularies, and others that `reduce.py` shortened.
NAMES = (
    *("llama-spm", "llama-bpe", "qwen2", "qwen35", "deepseek-coder", "deepseek-llm", "falcon"),
    *("gemma-4", "gpt-2", "mpt", "phi-3", "refact", "starcoder"),
)
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


@cache
def load(name: str) -> tokenizer.Tokenizer:
    return tokenizer.from_gguf(VOCABULARIES / f"ggml-vocab-{name}.gguf")


def golden(name: str) -> list[dict[str, Any]]:
    return json.loads((VOCABULARIES / f"{name}.json").read_text())


def spm_metadata(
    extra: dict[str, tuple[int, float]] | None = None, **changes: Any
) -> dict[str, Any]:
    """A small SentencePiece vocabulary: unknown, BOS, EOS, 256 bytes, text -> (type, score)."""
    tokens = {"<unk>": (UNKNOWN, 0.0), "<s>": (CONTROL, 0.0), "</s>": (CONTROL, 0.0)}
    tokens |= {f"<0x{byte:02X}>": (BYTE, 0.0) for byte in range(256)} | (extra or {})
    metadata = {
        "model": "llama",
        "tokens": list(tokens),
        "token_type": np.array([kind for kind, _ in tokens.values()], np.int32),
        "scores": np.array([score for _, score in tokens.values()], np.float32),
    }
    return {
        f"tokenizer.ggml.{key}": value
        for key, value in (metadata | changes).items()
        if value is not None
    }


def bpe_metadata(
    pairs: list[str], special: dict[str, int] | None = None, **changes: Any
) -> dict[str, Any]:
    """A small byte-level vocabulary: the 256 bytes, merged tokens, and special text -> type."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merged = list(dict.fromkeys(merge.replace(" ", "") for merge in pairs))
    special = special or {}
    tokens = [*alphabet, *merged, *special]
    types = [NORMAL] * (len(tokens) - len(special)) + list(special.values())
    metadata = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "merges": pairs,
        "token_type": np.array(types),
    }
    return {
        f"tokenizer.ggml.{key}": value
        for key, value in (metadata | changes).items()
        if value is not None
    }


def gemma_metadata(texts: list[str], merges: list[str], **changes: Any) -> dict[str, Any]:
    """A small vocabulary of Gemma 4's kind: BOS, 256 bytes, then `texts`."""
    tokens = ["<bos>", *(f"<0x{byte:02X}>" for byte in range(256)), *texts]
    types = np.array([CONTROL] + [BYTE] * 256 + [NORMAL] * len(texts))
    metadata = {"model": "gemma4", "tokens": tokens, "merges": merges, "token_type": types}
    metadata |= {"bos_token_id": 0, "add_bos_token": True}
    return {f"tokenizer.ggml.{key}": value for key, value in (metadata | changes).items()}


def build(metadata: dict[str, Any]) -> tokenizer.Tokenizer:
    return tokenizer.from_metadata(metadata, "model.gguf")


def texts(t: tokenizer.Tokenizer, ids: list[int]) -> list[str]:
    return [t.token(i) for i in ids]


@pytest.mark.parametrize("name", NAMES)
def test_golden_ids(name: str) -> None:
    t, entries = load(name), golden(name)
    assert len(entries) == 299
    for entry in entries:
        assert t.encode(entry["text"], add_special=False) == entry["ids"], entry["text"]
        assert t.encode(entry["text"], parse_special=True) == entry["ids_with_special"], entry[
            "text"
        ]


@pytest.mark.parametrize("name", ["bert-bge", "xlm-roberta"])
def test_golden_ids_of_encoders(name: str) -> None:
    """WordPiece and Unigram, which lose characters: `decode` inverts neither.

    Before WordPiece llama.cpp drops vowels of Hangul and Devanagari, which the models know.
    """
    t, entries = load(name), golden(name)
    assert len(entries) == 299
    if name == "bert-bge":
        entries = [e for e in entries if not re.search("[가-힣\u093f\u0940]", e["text"])]
        assert len(entries) == 264
        decomposed = t.encode("가", add_special=False)
        assert texts(t, decomposed) == ["▁\u1100", "\u1161"]
    for entry in entries:
        assert t.encode(entry["text"], add_special=False) == entry["ids"], entry["text"]
        got = t.encode(entry["text"], parse_special=True)
        assert got == entry["ids_with_special"], entry["text"]
    assert t.decode(t.encode("the sea was calm")) == "the sea was calm"


@pytest.mark.parametrize("name", NAMES)
def test_decode_inverts_encode(name: str) -> None:
    t = load(name)
    for entry in golden(name):
        assert t.decode(entry["ids"]) == entry["text"]
        assert t.decode(t.encode(entry["text"])) == entry["text"]


def test_prompt_of_the_text_model() -> None:
    entry = json.loads((GOLDEN / "text-spm.json").read_text())
    t = tokenizer.from_gguf(GOLDEN / "text-spm.Q4_K_M.gguf")
    assert t.encode(entry["prompt_text"]) == entry["prompt"]
    assert texts(t, entry["greedy_f32"]) == entry["greedy_pieces"]


def test_facts_of_the_golden_vocabularies() -> None:
    spm, bpe, qwen = load("llama-spm"), load("llama-bpe"), load("qwen2")
    assert (spm.vocab_size, spm.bos_token_id, spm.eos_token_ids) == (32000, 1, (2,))
    assert bpe.token(bpe.bos_token_id) == "<|begin_of_text|>"
    assert texts(bpe, bpe.eos_token_ids) == ["<|end_of_text|>", "<|eot_id|>"]
    assert {"<|endoftext|>", "<|im_end|>"} <= set(texts(qwen, qwen.eos_token_ids))
    assert qwen.chat_template.startswith("{% for message in messages %}")
    assert spm.chat_template is None
    gemma = load("gemma-4")
    assert texts(gemma, gemma.eos_token_ids) == ["<eos>", "<|tool_response>", "<turn|>"]
    assert texts(gemma, gemma.vocabulary.before) == ["<bos>"]


def merge_by_score(vocabulary: Any, text: str) -> list[int]:
    """Applies SentencePiece's rule directly: merge the pair with the best score until none is left.

    Of equal pairs, the leftmost is merged.
    """
    symbols = list(text.replace(" ", "\u2581"))
    while True:
        joined = (
            (i, vocabulary.ids.get(symbols[i] + symbols[i + 1])) for i in range(len(symbols) - 1)
        )
        pairs = [(vocabulary.scores[token], -i) for i, token in joined if token is not None]
        if not pairs:
            break
        at = -max(pairs)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    ids = []
    for symbol in symbols:
        known = vocabulary.ids.get(symbol)
        ids += (
            [vocabulary.ids[f"<0x{byte:02X}>"] for byte in symbol.encode()]
            if known is None
            else [known]
        )
    return ids


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.lists(
        st.sampled_from(
            [
                "the",
                "ing",
                "Quebec",
                "  ",
                " ",
                "\n",
                "aaaa",
                "====",
                "été",
                "中文",
                "🙂",
                "0x1F",
                "ъё",
            ]
        )
        | st.text(max_size=5),
        max_size=12,
    )
)
def test_sentencepiece_against_plain_merging(parts: list[str]) -> None:
    t, text = load("llama-spm"), "".join(parts)
    assert t.encode(text, add_special=False) == (
        merge_by_score(t.vocabulary, " " + text) if text else []
    )


def test_runs_of_spaces_share_a_score() -> None:
    t = load("llama-spm")
    for count in range(1, 70):
        for text in (" " * count, " " * count + "a", "b" + " " * count + "\n"):
            assert t.encode(text, add_special=False) == merge_by_score(t.vocabulary, " " + text)


@pytest.mark.slow("tokenizes many random texts")
@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.lists(st.text("abc▁", min_size=1, max_size=5), unique=True, max_size=30),
    st.lists(st.text("abcd ", max_size=20), max_size=3),
    st.randoms(use_true_random=False),
)
def test_any_scores_against_plain_merging(
    tokens: list[str], samples: list[str], random: Any
) -> None:
    """Not all characters of these vocabularies are tokens."""
    ranks = random.sample(range(len(tokens)), len(tokens))
    t = build(
        spm_metadata(
            {token: (NORMAL, -float(rank)) for token, rank in zip(tokens, ranks, strict=True)}
        )
    )
    for text in samples:
        want = merge_by_score(t.vocabulary, " " + text) if text else []
        got = t.encode(text, add_special=False)
        assert got == want, (text, tokens)


@pytest.mark.slow("tokenizes many random texts")
@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.lists(st.text("abc▁", min_size=2, max_size=3), unique=True, min_size=5, max_size=20),
    st.lists(st.integers(0, 2), min_size=20, max_size=20),
    st.lists(st.text("abcd ", min_size=3, max_size=20), min_size=3, max_size=3),
)
@example(["bc", "ab"], [0, 0], ["abc"])
def test_equal_scores_join_the_leftmost(
    tokens: list[str], scores: list[int], samples: list[str]
) -> None:
    """Like llama.cpp, the leftmost of equal pairs is merged. Unknown characters stay separate."""
    scored = zip(tokens, scores, strict=False)
    t = build(spm_metadata({token: (NORMAL, -float(score)) for token, score in scored}))
    for text in samples:
        want = merge_by_score(t.vocabulary, " " + text) if text else []
        assert t.encode(text, add_special=False) == want, (text, tokens)


@pytest.mark.parametrize(
    ("scores", "text"),
    [
        ({"bc": 0, "ab": 0}, "abc"),
        ({"bc": 0, "ab": 0, "cc": -1, "ccc": -1}, "abc ccc"),  # runs may share a score of their own
        ({"ab": 0, "abc": 0, "abcd": 0}, "abcd dabc"),  # each merged token joins the next
    ],
)
def test_few_equal_scores(scores: dict[str, int], text: str) -> None:
    """Pairs with the same score are merged from the left, and merged tokens continue."""
    t = build(spm_metadata({token: (NORMAL, float(score)) for token, score in scores.items()}))
    assert t.encode(text, add_special=False) == merge_by_score(t.vocabulary, " " + text)


def test_unknown_token_where_bytes_are_missing() -> None:
    metadata = spm_metadata({"▁": (NORMAL, 0.0), "a": (NORMAL, -1.0)})
    count = len(metadata["tokenizer.ggml.tokens"])
    keep = [i for i in range(count) if i != 3 + ord("é".encode()[:1])]
    for key in ("token_type", "scores"):
        metadata[f"tokenizer.ggml.{key}"] = metadata[f"tokenizer.ggml.{key}"][keep]
    tokens = metadata["tokenizer.ggml.tokens"]
    metadata["tokenizer.ggml.tokens"] = [tokens[i] for i in keep]
    t = build(metadata)
    assert texts(t, t.encode("aé", add_special=False)) == ["▁", "a", "<unk>"]


def test_bytes_without_a_token_keep_what_is_around_them_apart() -> None:
    """Falcon's vocabulary lacks control characters."""
    t = load("falcon")
    lacking = "\x03"
    assert "\u0103" not in t.vocabulary.ids  # its spelling in the byte alphabet
    assert texts(t, t.encode("==", add_special=False)) == ["=="]
    assert t.encode(lacking, add_special=False) == []
    assert texts(t, t.encode(f"={lacking}=", add_special=False)) == ["=", "="]
    assert texts(t, t.encode(f"{lacking}=={lacking}", add_special=False)) == ["=="]
    small = build(bpe_metadata(["a b"]))
    without = small.vocabulary.tokens.index("x")
    metadata = bpe_metadata(["a b"], tokens=[t for t in small.vocabulary.tokens if t != "x"])
    metadata["tokenizer.ggml.token_type"] = np.delete(
        metadata["tokenizer.ggml.token_type"], without
    )
    small = build(metadata)
    assert texts(small, small.encode("axbxab")) == ["a", "b", "ab"]


def test_texts_of_more_tokens_than_a_number() -> None:
    """Counted without encoding; nothing is said of vocabularies where tokens can be any length."""
    for name in ("llama-spm", "falcon", "qwen2"):
        t = load(name)
        longest = max(len(t.token_bytes(i)) for i in range(t.vocab_size))
        assert t.longest_token == longest
        assert not t.exceeds("é" * (10 * longest), 5)
        assert t.exceeds("é" * (10 * longest + 1), 5) == (name != "falcon")  # lacks some bytes
    metadata = spm_metadata({"a": (NORMAL, 0.0)})
    del metadata["tokenizer.ggml.tokens"][3 + ord("b")]
    for key in ("token_type", "scores"):
        values = metadata[f"tokenizer.ggml.{key}"]
        metadata[f"tokenizer.ggml.{key}"] = np.delete(values, 3 + ord("b"))
    assert not build(metadata).exceeds("é" * 1_000_000, 1)


def test_merges_follow_their_rank() -> None:
    t = build(bpe_metadata(["b c", "a b", "ab c"]))
    assert texts(t, t.encode("abc")) == ["a", "bc"]
    first_of_equals = build(bpe_metadata(["a b", "b c", "a b"]))
    assert texts(first_of_equals, first_of_equals.encode("abc")) == ["ab", "c"]


def test_ignore_merges_takes_whole_words() -> None:
    special = {"xyz": NORMAL, "<bos>": CONTROL}
    ignoring = build(bpe_metadata(["x y"], special, pre="llama-bpe", bos_token_id=257 + 1))
    assert texts(ignoring, ignoring.encode("xyz", add_special=False)) == ["xyz"]
    for pre in ("qwen2", "chatglm-bpe"):
        merging = build(bpe_metadata(["x y"], special, pre=pre))
        assert texts(merging, merging.encode("xyz", add_special=False)) == ["xy", "z"]
    without_bos = build(bpe_metadata(["x y"], special, pre="glm4"))
    assert texts(without_bos, without_bos.encode("xyz")) == ["xyz"]


SPLITS = [
    (
        "qwen2",
        "It's 2024, I'LL go\r\n\n  now!",
        ["It", "'s", " ", "2", "0", "2", "4", ",", " I", "'LL", " go"],
    ),
    ("llama-bpe", "It's 20245 x", ["It", "'s", " ", "202", "45", " x"]),
    ("llama-bpe", "a  b\t\tc", ["a", " ", " b", "\t", "\tc"]),
    ("gpt-2", "I'LL we'll 123 !?", ["I", "'", "LL", " we", "'ll", " 123", " !?"]),
    ("smollm", "ab 123!", ["ab", " ", "1", "2", "3", "!"]),
    ("default", "ab 12345!?", ["ab", " ", "123", "45", "!?"]),
    ("deepseek-coder", "x=12\ny 中文z", ["x", "=", "1", "2", "\n", "y", " ", "中文", "z"]),
    ("deepseek-llm", "x\u0561 y\ua7c2, 1234中", ["x", "ա", " y", "\ua7c2", ",", " ", "1234", "中"]),
    ("deepseek-v3", "a.b 1234 中文x", ["a", ".b", " ", "123", "4", " ", "中文", "x"]),
    ("gpt-4o", "HTTPServer's I'LL 12345", ["HTTPServer's", " I'LL", " ", "123", "45"]),
    ("gpt-4o", "fooBar //\n/x", ["foo", "Bar", " //\n/", "x"]),
    ("tiny_aya", "12345, 1x", ["12", "345", ",", " ", "1", "x"]),
    ("falcon", "a`b 1234  c", ["a", "`", "b", " ", "123", "4", " ", " c"]),
    ("bloom", "ab 12, c", ["ab", " 12", ",", " c"]),
    ("tekken", "HTTPServer café 12", ["HTTPServer", " café", " ", "1", "2"]),
    ("tekken", "aB", ["a", "B"]),
    ("qwen35", "हिन्दी x", ["हिन्दी", " x"]),
    ("seed-coder", "!\n\nx", ["!", "\n\n", "x"]),
    ("minicpm5", "12345 x", ["123", "45", " x"]),
    ("viking", "ab 12, c", ["ab", " ", "1", "2", ",", " c"]),
    ("bailingmoe", "It's\n\nx 12", ["It", "'s", "\n\n", "x", " ", "1", "2"]),
    (
        "kimi-k2",
        "中文abc's XMLFile 1234!/\n",
        ["中文", "abc's", " XMLFile", " ", "123", "4", "!/\n"],
    ),
    ("kimi-k2", "aB中", ["a", "B", "中"]),
    ("exaone-moe", "ab cd é, 12 x", ["ab cd é", ",", " ", "1", "2", " x"]),
    ("afmoe", "12345 中文가.x 6789", ["12", "345", " ", "中文가", ".x", " ", "6", "789"]),
    ("laguna", "a\n \nIt's", ["a", "\n", " ", "\n", "It", "'s"]),
    ("superbpe", "by the way 1234567", ["by the way ", "1", "234", "567"]),
    ("youtu", "가나 中文、aB's 12", ["가나", " ", "中文", "、", "a", "B's", " ", "1", "2"]),
    ("spark2_5", "a.b 1234\n\n!x", ["a", ".b", " ", "1", "2", "3", "4", "\n", "\n", "!x"]),
    ("chameleon", "a  b1! IMGIMGABZc", ["a", "  ", "b", "1", "!", " ", "IMGIMGABZ", "c"]),
    ("jais-2", "a" + 8 * " " + "b 1234", ["a", "    ", "  ", " ", " b", " ", "123", "4"]),
    ("ufakzeka", "Ankara'da", ["Ankara", "'da"]),
    ("qwen2", "Ankara'da", ["Ankara", "'d", "a"]),
]


@pytest.mark.parametrize(("pre", "text", "parts"), SPLITS)
def test_pre_tokenizers(pre: str, text: str, parts: list[str]) -> None:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    spelled = [byte_level.pre_tokenize_str(part)[0][0] for part in parts]
    got = [word for word, _ in splitter(PRE_TOKENIZERS[pre]).pre_tokenize_str(text)]
    assert got[: len(spelled)] == spelled
    assert "".join(got) == byte_level.pre_tokenize_str(text)[0][0]


@pytest.mark.parametrize(
    "pre", sorted({pre: name for name, pre in PRE_TOKENIZERS.items() if not pre.raw}.values())
)
def test_every_pre_tokenizer_loses_nothing(pre: str) -> None:
    t = build(bpe_metadata(["a b"], {"<bos>": CONTROL}, pre=pre, bos_token_id=257))
    assert bool(t.vocabulary.before) == PRE_TOKENIZERS[pre].add_bos
    for entry in golden("qwen2")[:60]:
        assert t.decode(t.encode(entry["text"])) == entry["text"]


def test_gemma_merges_lines_of_raw_text() -> None:
    t = build(gemma_metadata(["a", "b", "▁", "ab", "▁ab", "ba"], ["a b", "▁ ab", "b a"]))
    assert texts(t, t.encode("ab abab")) == ["<bos>", "ab", "▁ab", "ab"]
    assert texts(t, t.encode("ba")) == ["<bos>", "ba"]
    ids = t.encode("ab é\n", add_special=False)
    assert texts(t, ids) == ["ab", "▁", "<0xC3>", "<0xA9>", "<0x0A>"]
    assert t.decode(ids) == "ab é\n" and t.decode(t.encode(" ab")) == " ab"


def test_gemma_keeps_runs_of_line_ends_whole() -> None:
    t = build(gemma_metadata(["\n", "\n\n\n", "a", "aaa", "a\n"], ["a \n"]))
    assert texts(t, t.encode("a\n\n\naaa\n", add_special=False)) == [
        *("a", "\n\n\n", "a", "a", "a", "\n")
    ]
    assert texts(t, t.encode("\n\n", add_special=False)) == ["\n", "\n"]


def test_sarvam_merges_as_gemma_does_but_for_line_ends_and_bos() -> None:
    changes = {"model": "gpt2", "pre": "sarvam-moe", "add_bos_token": False}
    t = build(gemma_metadata(["\n", "\n\n\n", "a", "▁", "▁a"], ["▁ a"], **changes))
    assert texts(t, t.encode("a a\n\n\n")) == ["a", "▁a", "\n", "\n", "\n"]


def test_gemma_always_begins_with_bos() -> None:
    """Early files set add_bos_token to false. Others call the model "gpt2"."""
    for changes in ({"add_bos_token": False}, {"model": "gpt2", "pre": "gemma4"}):
        t = build(gemma_metadata(["a"], [], **changes))
        assert texts(t, t.encode("a")) == ["<bos>", "a"]


def test_white_space_after_phi_3s_special_tokens() -> None:
    path = VOCABULARIES / "ggml-vocab-phi-3.gguf"
    metadata = dict(jq.gguf.read_header(path).metadata)
    text = "<|user|>\n Hello<|end|>\n\t<|assistant|> \n<s> <|endoftext|> "
    t = build(metadata)
    assert texts(t, t.encode(text, add_special=False, parse_special=True)) == [
        *("<|user|>", "▁Hello", "<|end|>", "<|assistant|>", "<s>", "▁▁", "<|endoftext|>", "▁▁")
    ]
    other = build(metadata | {"general.name": "Llama"})
    ids = other.encode("<|end|>\n", add_special=False, parse_special=True)
    assert texts(other, ids) == ["<|end|>", "▁", "<0x0A>"]


def test_special_tokens_in_text() -> None:
    special = {
        "<|x|>": CONTROL,
        "<|x|><|y|>": CONTROL,
        "<tool>": USER_DEFINED,
        "<|im_end|>": NORMAL,
    }
    t = build(bpe_metadata(["a b"], special))
    text = "<tool>ab<|x|>ab<|x|><|y|><|im_end|>"
    parsed = ["<tool>", "ab", "<|x|>", "ab", "<|x|><|y|>", "<|im_end|>"]
    assert texts(t, t.encode(text, parse_special=True)) == parsed
    unparsed = texts(t, t.encode(text))
    assert unparsed[0] == "<tool>"
    assert not {"<|x|>", "<|x|><|y|>", "<|im_end|>"} & set(unparsed)
    assert t.decode(t.encode(text)) == text
    assert t.decode(t.encode(text, parse_special=True)) == "<tool>abab"
    assert t.decode(t.encode(text, parse_special=True), skip_special=False) == text


def test_longer_special_token_wins_over_one_further_left() -> None:
    t = build(bpe_metadata([], {"<ab": USER_DEFINED, "abcd": USER_DEFINED}))
    assert texts(t, t.encode("<abcd")) == ["<", "abcd"]


def test_space_prefix() -> None:
    tokens = {"▁": (NORMAL, -1.0), "▁a": (NORMAL, 0.0), "a": (NORMAL, -1.0)}
    t = build(spm_metadata(tokens))
    assert texts(t, t.encode("a<s>a", parse_special=True)) == ["<s>", "▁a", "<s>", "▁a"]
    assert t.decode(t.encode("a", add_special=False)) == "a"
    assert t.decode(t.encode("a", add_special=False), strip_prefix=False) == " a"
    without = build(spm_metadata(tokens, add_space_prefix=False))
    assert texts(without, without.encode("a a")) == ["<s>", "a", "▁a"]
    assert without.decode(without.encode(" a")) == " a"


@pytest.mark.parametrize(
    ("metadata", "before", "after"),
    [
        (spm_metadata(), ["<s>"], []),
        (spm_metadata(add_bos_token=False), [], []),
        (spm_metadata(add_eos_token=True), ["<s>"], ["</s>"]),
        (bpe_metadata([]), [], []),
        (bpe_metadata([], {"<b>": CONTROL}, pre="llama-bpe", bos_token_id=256), ["<b>"], []),
        (
            bpe_metadata([], {"<b>": CONTROL}, pre="tekken", bos_token_id=256, add_bos_token=False),
            [],
            [],
        ),
        (bpe_metadata([], {"<b>": CONTROL}, bos_token_id=256, add_bos_token=True), ["<b>"], []),
        (bpe_metadata([], {"<e>": CONTROL}, eos_token_id=256, add_eos_token=True), [], ["<e>"]),
    ],
)
def test_bos_and_eos(metadata: dict[str, Any], before: list[str], after: list[str]) -> None:
    t = build(metadata)
    plain = t.encode("hi", add_special=False)
    assert texts(t, t.encode("hi")) == [*before, *texts(t, plain), *after]


def test_end_of_generation() -> None:
    special = {
        name: CONTROL for name in ("<e>", "<turn>", "<|eot_id|>", "<|file_sep|>", "<|fim_prefix|>")
    }
    t = build(bpe_metadata([], special, eos_token_id=256, eot_token_id=257))
    assert t.eos_token_id == 256
    assert texts(t, t.eos_token_ids) == ["<e>", "<turn>", "<|eot_id|>", "<|file_sep|>"]


@pytest.mark.parametrize(
    ("special", "ends", "printed"),
    [
        # gpt-oss: <|end|> closes a channel, and channel markers are text
        (
            ("<|return|>", "<|call|>", "<|end|>", "<|channel|>"),
            ["<|return|>", "<|call|>"],
            "<|end|><|channel|>",
        ),
        (("<|return|>", "<|end|>"), ["<|return|>", "<|end|>"], ""),  # Phi's <|end|>
        (("<|calls|>", "<|flush|>", "<|end|>"), ["<|calls|>", "<|flush|>"], "<|end|>"),
        (("<|call|>", "<|flush|>", "<|end|>"), ["<|call|>", "<|flush|>"], "<|end|>"),
        (("<|return|>", "<|calls|>", "<|end|>"), ["<|return|>", "<|calls|>"], "<|end|>"),
        (("<|call|>", "<|end|>"), ["<|call|>", "<|end|>"], ""),
        # Gemma 4: </s> is markup
        (("<|tool_response>", "</s>", "<turn|>"), ["<|tool_response>", "<turn|>"], "</s>"),
        (("<eos>", "</s>"), ["<eos>", "</s>"], ""),
    ],
)
def test_texts_that_end_nothing_beside_others(
    special: tuple[str, ...], ends: list[str], printed: str
) -> None:
    t = build(bpe_metadata([], {name: CONTROL for name in special}))
    assert texts(t, t.eos_token_ids) == ends
    ids = [t.vocabulary.ids[text] for text in special]
    assert t.decode(ids) == printed


def test_a_normal_token_is_not_cut_out_of_texts() -> None:
    t = build(bpe_metadata([], {"<|tool_response>": CONTROL, "</s>": CONTROL}))
    assert len(t.encode("</s>", add_special=False)) == 4
    printed = build(bpe_metadata([], {"<|channel|>": CONTROL}))
    assert len(printed.encode("<|channel|>", add_special=False)) == 1


def test_an_end_of_the_files_own_goes_too() -> None:
    special = {"<|plamo:eos|>": CONTROL, "</s>": CONTROL}
    t = build(bpe_metadata([], special, eos_token_id=257, eot_token_id=256))
    assert (t.eos_token_id, texts(t, t.eos_token_ids)) == (257, ["<|plamo:eos|>"])


@pytest.mark.parametrize("place", ["prefix", "suffix", "middle"])
def test_fill_in_the_middle_by_text(place: str) -> None:
    t = build(bpe_metadata([], {f"<|code_{place}|>": USER_DEFINED}))
    assert t.vocabulary.types[256] == CONTROL and t.eos_token_ids == ()


@pytest.mark.parametrize("name", NAMES)
def test_a_tokenizer_that_has_encoded_can_be_pickled(name: str) -> None:
    t = load(name)
    ids = t.encode("Two sisters walked.")
    copied = pickle.loads(pickle.dumps(t))
    assert copied.encode("Two sisters walked.") == ids and copied.decode(ids) == t.decode(ids)


def test_streaming_equals_decoding() -> None:
    for name in NAMES:
        t = load(name)
        ids = t.encode("naïve 🙂👩‍👩‍👧 한국어 \x00 <s> " + "मुंबई", parse_special=True)
        for skip in (True, False):
            stream = t.stream(skip_special=skip)
            pieces = [stream.push(i) for i in ids] + [stream.finish()]
            assert "".join(pieces) == t.decode(ids, skip_special=skip)
            assert not any("\ufffd" in piece for piece in pieces)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 31999), max_size=8) | st.lists(st.integers(3, 258), max_size=12))
def test_streaming_of_any_ids(ids: list[int]) -> None:
    t = load("llama-spm")
    stream = t.stream(skip_special=False, strip_prefix=False)
    raw = b"".join(map(t.token_bytes, ids))
    want = raw.decode(errors="replace")
    assert "".join(map(stream.push, ids)) + stream.finish() == want
    assert t.decode(ids, skip_special=False, strip_prefix=False) == want


def test_tokens_that_contain_texts_in_threads() -> None:
    """More texts than the cache holds, so that threads drop each other's results."""
    t = build(spm_metadata({"ab": (NORMAL, 0.0)}))
    want = {text: t.tokens_with((text,)) for text in map(chr, range(97, 117))}
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as pool:
            asked = [*want] * 8
            found = pool.map(lambda text: t.tokens_with((text,)), asked)
            assert [*found] == [want[text] for text in asked]
    finally:
        sys.setswitchinterval(interval)
    assert len(want["a"]) == 2


def test_a_character_waits_for_its_last_byte() -> None:
    t = build(spm_metadata())
    stream = t.stream()
    assert [stream.push(3 + byte) for byte in "🙂".encode()] == ["", "", "", "🙂"]
    stream.push(3 + 0xF0)
    assert stream.finish() == "\ufffd"


def test_unused_and_empty_tokens() -> None:
    t = build(spm_metadata({"": (NORMAL, -5.0), "gone": (UNUSED, -6.0)}))
    assert t.token(259) == "[EMPTY_259]"
    assert t.decode([260]) == ""


def test_calls_with_wrong_arguments() -> None:
    t = build(spm_metadata())
    with pytest.raises(TypeError, match="text is of type bytes, expected str"):
        t.encode(b"hi")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="lone surrogate at position 1"):
        t.encode("a\ud800")
    for ids in (None, "hi", b"hi", 3):
        with pytest.raises(TypeError, match=f"ids is of type {type(ids).__name__}; it must be"):
            t.decode(ids)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a token id is of type float; it must be an integer"):
        t.decode([1.0])  # type: ignore[list-item]
    for token in (-1, 259):
        with pytest.raises(
            ValueError, match=f"token id {token} is outside of the vocabulary, 0 to 258"
        ):
            t.decode([token])
    with pytest.raises(TypeError):
        t.decode([1.5])  # type: ignore[list-item]


BAD = [
    (spm_metadata(model=None), "model", "is missing; supported: 'llama'"),
    (spm_metadata(model="no_vocab"), "model", "is 'no_vocab'"),
    (spm_metadata(model=7), "model", "is of type int, expected str"),
    (spm_metadata(tokens=None), "tokens", "is missing"),
    (spm_metadata(tokens=[]), "tokens", "is empty"),
    (spm_metadata(tokens="abc"), "tokens", "is not an array of strings"),
    (spm_metadata(tokens=["<unk>", "a", "a"]), "tokens", "holds 'a' twice, as ids 1 and 2"),
    (spm_metadata({"<0xG1>": (BYTE, 0.0)}), "tokens", "id 259, a byte token, is '<0xG1>'"),
    (spm_metadata(scores=None), "scores", "is missing"),
    (
        spm_metadata(scores=np.zeros(7, np.float32)),
        "scores",
        "has 7 entries, expected one for each of the 259",
    ),
    (spm_metadata(scores=np.full(259, np.nan, np.float32)), "scores", "is NaN for id 0"),
    (spm_metadata(token_type=np.ones(260, np.int32)), "token_type", "has 260 entries"),
    (
        spm_metadata(token_type=np.ones(259, np.float32)),
        "token_type",
        "is not an array of integers",
    ),
    (spm_metadata(token_type=np.full(259, 7)), "token_type", "is 7 for id 0, expected 0 to 6"),
    (spm_metadata(token_type=np.full(259, 2**64 - 5, np.uint64)), "token_type", "is -5 for id 0"),
    (spm_metadata(bos_token_id=True), "bos_token_id", "is of type bool, expected int"),
    (spm_metadata(add_bos_token=1), "add_bos_token", "is of type int, expected bool"),
    (
        bpe_metadata([], pre="nonesuch"),
        "pre",
        "is 'nonesuch', which is unknown; supported: a.x-4.0",
    ),
    (bpe_metadata([], merges=None), "merges", "is missing"),
    (bpe_metadata([], model="gemma4"), "bos_token_id", "is missing, but add_bos_token asks for"),
    (
        bpe_metadata([], {"<bos>": CONTROL}, pre="gemma4", bos_token_id=256),
        "tokens",
        "has neither all of '<0x00>' to '<0xFF>' nor an unknown token",
    ),
    (
        bpe_metadata(["a b"], merges=["ab"]),
        "merges",
        "entry 0 is 'ab', expected two tokens that form a third",
    ),
    (bpe_metadata(["a b"], merges=["a b", "ab c"]), "merges", "entry 1 is 'ab c'"),
    (
        bpe_metadata([], pre="llama-bpe"),
        "bos_token_id",
        "is missing, but add_bos_token asks for one",
    ),
    (
        bpe_metadata([], add_eos_token=True),
        "eos_token_id",
        "is missing, but add_eos_token asks for one",
    ),
]


@pytest.mark.parametrize("end", ["bos", "eos"])
def test_bad_ids_of_tokens_that_are_added(end: str) -> None:
    """llama.cpp then uses token 11 of byte-level vocabularies."""
    key = f"{end}_token_id"
    metadata = bpe_metadata([], **{key: 2**32 - 1, f"add_{end}_token": True})
    with pytest.warns(match=f"{key} is 4294967295, but the vocabulary has .*: token 11 is used"):
        assert getattr(build(metadata), key) == 11
    with pytest.warns(match=f"{key} is 4294967295, .*: no token is used"):
        assert getattr(build(metadata | {f"tokenizer.ggml.add_{end}_token": False}), key) is None


@pytest.mark.parametrize(
    ("metadata", "key", "problem"), BAD, ids=lambda value: value if isinstance(value, str) else ""
)
def test_bad_metadata(metadata: dict[str, Any], key: str, problem: str) -> None:
    with pytest.raises(jq.GGUFError) as error:
        build(metadata)
    assert str(error.value).startswith(f"model.gguf: tokenizer.ggml.{key}: {problem}")


@pytest.mark.parametrize(
    ("key", "value", "default"),
    [
        ("bos_token_id", 2**32 - 1, 1),
        ("eos_token_id", 259, 2),
        ("unknown_token_id", -1, 0),
        ("eot_token_id", 2**32 - 1, None),
    ],
)
def test_ids_beyond_the_vocabulary_count_as_missing(key, value, default) -> None:
    want = build(spm_metadata())
    instead = "no token is used" if default is None else f"token {default} is used"
    problem = f"model.gguf: tokenizer.ggml.{key} is {value}, but the vocabulary has 259 tokens"
    with pytest.warns(UserWarning, match=f"^{problem}: {instead}$") as caught:
        got = build(spm_metadata(**{key: value}))
    assert len(caught) == 1
    for name in ("bos_token_id", "eos_token_id", "eos_token_ids"):
        assert getattr(got, name) == getattr(want, name)
    assert got.encode("hi") == want.encode("hi")


def test_bad_chat_template() -> None:
    with pytest.raises(jq.GGUFError, match="tokenizer.chat_template: is of type int, expected str"):
        build(spm_metadata() | {"tokenizer.chat_template": 3})


def test_neither_bytes_nor_unknown() -> None:
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "a", "b"],
        "tokenizer.ggml.scores": [0.0, 0.0, 0.0],
    }
    assert build(metadata).encode("é", add_special=False) == [0, 0]  # the space, the letter
    only_words = metadata | {"tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.scores": [0.0]}
    with pytest.raises(jq.GGUFError, match="bos_token_id: is missing"):
        build(only_words)


def test_a_model_without_vocabulary() -> None:
    metadata = jq.gguf.read_header(GOLDEN / "llama-gqa.Q4_K_M.gguf").metadata
    assert not tokenizer.has_tokenizer(metadata)
    assert tokenizer.has_tokenizer(spm_metadata())
    with pytest.raises(jq.GGUFError, match="no_vocab"):
        tokenizer.from_gguf(GOLDEN / "llama-gqa.Q4_K_M.gguf")


def test_a_token_of_absurd_length() -> None:
    t = build(spm_metadata({"a" * 1_000_000: (NORMAL, 0.0), "▁": (NORMAL, -1.0)}))
    assert texts(t, t.encode("aa", add_special=False)) == ["▁", "<0x61>", "<0x61>"]


def test_tokens_with_many_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = spm_metadata({"a" * n: (NORMAL, -float(n)) for n in range(1, 2001)})
    t = build(metadata)
    assert max(map(len, texts(t, t.encode("a" * 999, add_special=False)))) == 256
    monkeypatch.setattr(encoders, "MAX_MERGES", 1000)
    with pytest.raises(
        jq.GGUFError, match="tokens: can be split into two other tokens in more than 1000 ways"
    ):
        build(metadata)
