"""Converts tokenizer.json to GGUF metadata, compared with llama.cpp's ids for the vocabularies."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import tokenizers
from gguf.constants import TokenType
from support.paths import GOLDEN
from tokenizers import Regex, decoders, normalizers, pre_tokenizers, processors, trainers
from tokenizers import models as bpe

import jax_q4k as jq
from jax_q4k.models import tokenizer
from jax_q4k.models.tokenizer.encoders import LONGEST_MERGED
from jax_q4k.models.tokenizer.from_json import tokens

from .test_tokenizer import VOCABULARIES, golden, load

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
PATTERN = (
    CONTRACTIONS
    + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@cache
def tokenizer_json(name: str) -> str:
    """Writes a golden vocabulary with the `tokenizers` library, like the model's publisher."""
    v = load(name).vocabulary
    types = (
        jq.gguf.read_header(VOCABULARIES / f"ggml-vocab-{name}.gguf")
        .metadata["tokenizer.ggml.token_type"]
        .tolist()
    )
    special, normal = {TokenType.CONTROL, TokenType.UNKNOWN}, TokenType.NORMAL
    added = [t for t, kind in zip(v.tokens, types, strict=True) if kind in special]
    if name == "gemma-4":
        t = tokenizers.Tokenizer(bpe.BPE(v.ids, list(v.merges), fuse_unk=True, byte_fallback=True))
        t.normalizer = normalizers.Replace(" ", "▁")
        t.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
        t.post_processor = processors.TemplateProcessing(
            "<bos> $A", "<bos> $A <bos> $B", [("<bos>", v.ids["<bos>"])]
        )
        added = [t for t, kind in zip(v.tokens, types, strict=True) if kind in (3, 4)]
    elif name in ("llama-spm", "phi-3"):
        splits = [(t[:i], t[i:]) for t in v.tokens for i in range(1, len(t))]
        merges = [pair for pair in splits if pair[0] in v.ids and pair[1] in v.ids]
        merges.sort(key=lambda pair: -v.scores[v.ids["".join(pair)]])
        t = tokenizers.Tokenizer(
            bpe.BPE(v.ids, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
        )
        t.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        t.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A <s> $B", [("<s>", 1)])
    else:
        llama = name == "llama-bpe"
        vocab = {t: i for t, i in v.ids.items() if types[i] == normal}
        t = tokenizers.Tokenizer(bpe.BPE(vocab, list(v.merges), ignore_merges=llama))
        pattern = Regex(PATTERN.replace("DIGITS", "{1,3}" if llama else ""))
        split = pre_tokenizers.Split(pattern, behavior="isolated")
        t.pre_tokenizer = pre_tokenizers.Sequence(
            [split, pre_tokenizers.ByteLevel(False, use_regex=False)]
        )
        t.decoder = decoders.ByteLevel()
        if llama:
            begin = "<|begin_of_text|>"
            template = processors.TemplateProcessing(
                f"{begin} $A", f"{begin} $A {begin} $B", [(begin, v.bos_token_id)]
            )
            t.post_processor = processors.Sequence([processors.ByteLevel(), template])
        else:
            t.normalizer = normalizers.NFC()
    t.add_special_tokens(added)
    return t.to_str()


@pytest.mark.parametrize("name", ["llama-spm", "llama-bpe", "qwen2", "gemma-4"])
def test_golden_ids(name: str) -> None:
    v = load(name).vocabulary
    config = {"eos_token": v.tokens[v.eos_token_id]}
    metadata = tokenizer.metadata_from_json(
        json.loads(tokenizer_json(name)), config, vocab_size=len(v.tokens)
    )
    got = tokenizer.from_metadata(metadata)
    assert got.vocab_size == len(v.tokens)
    for entry in golden(name):
        assert got.encode(entry["text"], add_special=False) == entry["ids"], entry["text"]
        assert got.encode(entry["text"], parse_special=True) == entry["ids_with_special"], entry[
            "text"
        ]
        assert got.decode(entry["ids"]) == entry["text"]


def test_gemma_keeps_its_merges() -> None:
    content, ids = json.loads(tokenizer_json("gemma-4")), load("gemma-4").vocabulary.ids
    content["added_tokens"].append(FLAGS | {"id": ids["▁▁"], "content": "▁▁"})
    metadata = tokenizer.metadata_from_json(content, {"eos_token": "<eos>"})
    assert metadata["tokenizer.ggml.model"] == "gemma4"
    assert len(metadata["tokenizer.ggml.merges"]) == len(content["model"]["merges"])
    got = tokenizer.from_metadata(metadata)
    assert got.decode([ids["▁▁"], ids["<|channel>"], ids["<|turn>"]]) == "  <|channel>"
    content["post_processor"] = None
    with pytest.raises(jq.CheckpointError, match="post_processor: adds no BOS before texts, but"):
        tokenizer.metadata_from_json(content, {"eos_token": "<eos>"})


def tiny(name: str) -> dict[str, Any]:
    """A small checkpoint's tokenizer.json: "llama" (like SentencePiece) or "qwen2" (byte-level)."""
    return json.loads((GOLDEN.parent / "checkpoints" / name / "tokenizer.json").read_text())


def read(
    content: dict[str, Any], config: dict[str, Any] | None = None, **options: Any
) -> tokenizer.Tokenizer:
    return tokenizer.from_metadata(tokenizer.metadata_from_json(content, config, **options))


def test_merges_as_texts_and_as_pairs() -> None:
    for name in ("llama", "qwen2"):
        content = tiny(name)
        pairs = [
            merge if isinstance(merge, list) else merge.split(" ")
            for merge in content["model"]["merges"]
        ]
        metadata = []
        for merges in (pairs, [" ".join(pair) for pair in pairs]):
            content["model"]["merges"] = merges
            metadata.append(tokenizer.metadata_from_json(content))
        assert all(np.array_equal(metadata[0][key], value) for key, value in metadata[1].items())


DIGITS = {"type": "Digits", "individual_digits": True}
LETTERS = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?UPPER*LOWER+|[^\r\n\p{L}\p{N}]?UPPER+LOWER*|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = TEKKEN.replace("UPPER", LETTERS[0]).replace("LOWER", LETTERS[1])
O200K = (
    r"[^\r\n\p{L}\p{N}]?UPPER*LOWER+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?UPPER+LOWER*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = O200K.replace("UPPER", LETTERS[0]).replace("LOWER", LETTERS[1])
#: with literal line ends, as in its file
DEEPSEEK = (
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
)


def split(pattern: str, behavior: str = "Isolated", invert: bool = False) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior, "invert": invert}


@pytest.mark.parametrize(
    ("steps", "use_regex", "ignore_merges", "name"),
    [
        ([split(PATTERN.replace("DIGITS", "{1,3}"))], False, True, "llama-bpe"),
        ([split(PATTERN.replace("DIGITS", "{1,3}"), "Removed", True)], False, True, "llama-bpe"),
        ([split(PATTERN.replace("DIGITS", "{1,3}"))], False, False, "smaug-bpe"),
        ([split(PATTERN.replace("DIGITS", ""))], False, False, "qwen2"),
        ([split(TEKKEN)], False, True, "tekken"),
        ([split(O200K)], False, False, "gpt-4o"),
        (
            [split("\\p{N}{1,3}"), split("[一-龥\u3040-ゟ゠-ヿ]+"), split(DEEPSEEK)],
            False,
            False,
            "deepseek-v3",
        ),
        ([], True, False, "gpt-2"),
        ([DIGITS], True, False, "smollm"),
    ],
)
def test_pre_tokenizers_have_ggufs_names(
    steps: list, use_regex: bool, ignore_merges: bool, name: str
) -> None:
    content = tiny("qwen2")
    content["model"]["ignore_merges"] = ignore_merges
    last = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": use_regex,
    }
    content["pre_tokenizer"] = (
        {"type": "Sequence", "pretokenizers": [*steps, last]} if steps else last
    )
    metadata = tokenizer.metadata_from_json(content)
    assert (metadata["tokenizer.ggml.model"], metadata["tokenizer.ggml.pre"]) == ("gpt2", name)
    library, got = (
        tokenizers.Tokenizer.from_str(json.dumps(content)),
        tokenizer.from_metadata(metadata),
    )
    for text in ("Hello wOrld 1234, it's  tHE\n\n end...", "naïve 木 12٣ 'S //\n/"):
        assert got.encode(text) == library.encode(text).ids


def test_byte_level_splits_words_unless_told_otherwise() -> None:
    content = tiny("qwen2")
    content["pre_tokenizer"] = BYTE_LEVEL
    assert tokenizer.metadata_from_json(content)["tokenizer.ggml.pre"] == "gpt-2"


def test_ids_that_the_library_reads_otherwise() -> None:
    """The library numbers added tokens from the end of the model's tokens."""
    content = tiny("qwen2")
    content["added_tokens"].append(FLAGS | {"id": 285, "content": "<x>"})
    problem = "added_tokens: has id 285 for '<x>', which the tokenizers library reads as 283"
    with pytest.raises(jq.CheckpointError, match=problem):
        tokenizer.from_json(content, vocab_size=290)


def with_tokens(*texts: str) -> dict[str, Any]:
    """The SentencePiece-like vocabulary with additional tokens that no merge forms."""
    content = tiny("llama")
    for text in texts:
        content["model"]["vocab"][text] = len(content["model"]["vocab"])
    return content


def test_runs_of_one_character_share_a_score() -> None:
    """Their merges may interleave in any order; later merges have lower scores."""
    runs = ["\u01c1" * n for n in (1, 2, 3, 4)]
    one, two, three, four = runs
    content = with_tokens(*runs, one + "e")
    content["model"]["merges"] += [
        [one, three],
        [one, one],
        [one, two],
        [two, one],
        [two, two],
        [three, one],
        [one, "e"],
    ]
    metadata = tokenizer.metadata_from_json(content)
    content["model"]["merges"].insert(-3, content["model"]["merges"].pop())
    with pytest.raises(jq.CheckpointError, match="model.merges: interleaves those of"):
        tokenizer.metadata_from_json(content)
    scores = dict(
        zip(metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"], strict=True)
    )
    assert (
        scores[two]
        == scores[three]
        == scores[four]
        == scores[one + "e"] + 1
        < min(score for text, score in scores.items() if "\u01c1" not in text)
    )


def test_tokens_that_need_no_merges() -> None:
    """Added tokens, and tokens longer than the encoder here merges."""
    content = with_tokens("e" * (LONGEST_MERGED + 1), "e" * (LONGEST_MERGED + 2))
    tokenizer.metadata_from_json(content)
    for text in ("x\u01c1", "\u01c1 \u2581\u01c1"):
        content = (
            with_tokens("\u01c1", "x")
            if "x" not in tiny("llama")["model"]["vocab"]
            else with_tokens("\u01c1")
        )
        content["normalizer"], content["pre_tokenizer"] = (
            None,
            {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always"},
        )
        content["added_tokens"].append(
            FLAGS | {"id": len(content["model"]["vocab"]), "content": text, "special": True}
        )
        assert tokenizer.metadata_from_json(content)["tokenizer.ggml.tokens"][-1] == text
        content["model"]["vocab"][text] = content["added_tokens"].pop()["id"]
        with pytest.raises(jq.CheckpointError):
            tokenizer.metadata_from_json(content)


def test_a_token_that_is_called_like_padding() -> None:
    content = tiny("qwen2")
    content["added_tokens"].append({"id": 290, "content": "[PAD291]", "special": False})
    with pytest.raises(
        jq.CheckpointError, match=r"model.vocab: holds '\[PAD291\]', the name of a padding token"
    ):
        tokenizer.metadata_from_json(content, vocab_size=294)


def test_merges_of_tokens_with_spaces_and_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    content = tiny("qwen2")
    size = len(content["model"]["vocab"])
    for token in content["added_tokens"]:
        token["id"] += 2
    content["model"]["vocab"] |= {"a b": size, "a be": size + 1}
    content["model"]["merges"].append(["a b", "e"])
    tokenizer.from_json(content)
    rank = len(content["model"]["merges"]) - 1
    with pytest.raises(
        jq.CheckpointError, match=rf"merges\[{rank}\]: is .*, whose spaces GGUF cannot express"
    ):
        tokenizer.metadata_from_json(content)
    monkeypatch.setattr(tokens, "MAX_MERGES", 5)
    with pytest.raises(
        jq.CheckpointError, match=r"model.merges: has \d+ entries, expected at most 5"
    ):
        tokenizer.metadata_from_json(tiny("llama"))


def test_types_of_tokens() -> None:
    content = tiny("qwen2")
    content["added_tokens"] += [
        FLAGS | {"id": 283, "content": "<tool>"},
        # looks like a turn marker, so users must not write it
        FLAGS | {"id": 284, "content": "<|tool|>"},
    ]
    metadata = tokenizer.metadata_from_json(content, vocab_size=287)
    assert metadata["tokenizer.ggml.tokens"][283:] == ["<tool>", "<|tool|>", "[PAD285]", "[PAD286]"]
    assert metadata["tokenizer.ggml.token_type"][283:].tolist() == [
        TokenType.USER_DEFINED,
        TokenType.CONTROL,
        TokenType.UNUSED,
        TokenType.UNUSED,
    ]
    for got in (tokenizer.from_metadata(metadata), tokenizer.from_json(content, vocab_size=287)):
        assert got.encode("<tool>") == [283] and 284 not in got.encode("<|tool|>")
        assert got.encode("<|tool|>", parse_special=True) == [284]
        assert got.decode([285, 283, 286, 284]) == "<tool>"
        assert got.decode([284], skip_special=False) == "<|tool|>"
    types = tokenizer.metadata_from_json(tiny("llama"))["tokenizer.ggml.token_type"]
    assert types[:260].tolist() == [
        TokenType.UNKNOWN,
        *[TokenType.CONTROL] * 2,
        *[TokenType.BYTE] * 256,
        1,
    ]


def test_special_tokens_and_what_is_added() -> None:
    def found(
        name: str, config: dict[str, Any] | None, around: tuple[str, ...] = ()
    ) -> dict[str, Any]:
        content = tiny(name)
        if around:
            template_of(*around)(content)
        metadata = tokenizer.metadata_from_json(content, config)
        return {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}

    keys = "bos_token_id", "eos_token_id", "add_bos_token", "add_eos_token"
    end = {"content": "<|im_end|>", "lstrip": False}
    config = {"eos_token": end, "bos_token": "<|endoftext|>", "pad_token": "[gone]"}
    got = found("qwen2", config, ("<|endoftext|>", "$A"))
    assert [got[key] for key in keys] == [281, 280, True, False]
    got = found("qwen2", config, ("$A", "<|im_end|>"))
    assert [got[key] for key in keys] == [281, 280, False, True]
    assert found("qwen2", {"pad_token": "<|endoftext|>"})["padding_token_id"] == 281
    assert "padding_token_id" not in got and "bos_token_id" not in found("qwen2", {})
    got = found("qwen2", {}, ("<|im_start|>", "$A", "<|im_end|>"))  # named only by the template
    assert [got[key] for key in keys] == [282, 280, True, True]
    # the post-processor puts BOS first; SentencePiece's names cover the rest
    got = found("llama", None)
    assert got["unknown_token_id"] == 0 and [got[key] for key in keys] == [1, 2, True, False]


@pytest.mark.parametrize(
    ("config", "around", "warned"),
    [
        ({"add_bos_token": True}, ("$A",), "add_bos_token is true, .* adds none"),
        ({"add_bos_token": False}, ("<|endoftext|>", "$A"), "add_bos_token is false, .* adds one"),
        ({"add_eos_token": True}, ("$A",), "add_eos_token is true, .* adds none"),
        ({"add_eos_token": False}, ("$A", "<|im_end|>"), "add_eos_token is false, .* adds one"),
    ],
)
def test_the_template_counts_and_not_the_flags(
    config: dict[str, Any], around: tuple[str, ...], warned: str
) -> None:
    """transformers 5 also ignores the flags if there is a tokenizer.json."""
    content = tiny("qwen2")
    template_of(*around)(content)
    names = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
    with pytest.warns(UserWarning, match=f"tokenizer_config.json: {warned}"):
        t = tokenizer.from_json(content, names | config)
    assert (
        t.encode("Hello") == tokenizers.Tokenizer.from_str(json.dumps(content)).encode("Hello").ids
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        agreeing = {key: not value for key, value in config.items()}
        again = tokenizer.from_json(content, names | agreeing)
    assert again.encode("Hello") == t.encode("Hello")


def test_two_tokens_in_front() -> None:
    """GLM has two leading tokens; GGUF names one."""
    content = tiny("qwen2")
    template_of("<|im_start|>", "<|endoftext|>", "$A", "<|im_end|>")(content)
    t = tokenizer.from_json(content, {"eos_token": "<|im_end|>"})
    library = tokenizers.Tokenizer.from_str(json.dumps(content))
    assert t.encode("Hello") == library.encode("Hello").ids
    assert t.encode("Hello", add_end=False) == library.encode("Hello").ids[:-1]
    assert (t.encode(""), t.bos_token_id) == ([282, 281, 280], 282)
    with pytest.warns(
        UserWarning, match="cannot express that '<.im_start.>', '<.endoftext.>' are added"
    ):
        metadata = t.gguf_metadata()
    assert metadata["tokenizer.ggml.add_bos_token"] is False
    assert metadata["tokenizer.ggml.add_eos_token"] is True


def test_chat_templates() -> None:
    def template(value: Any) -> str | None:
        return tokenizer.metadata_from_json(tiny("qwen2"), {"chat_template": value}).get(
            "tokenizer.chat_template"
        )

    named = [{"name": "tool_use", "template": "a"}, {"name": "default", "template": "b"}]
    assert (template("x"), template(None), template(named), template(named[:1])) == (
        "x",
        None,
        "b",
        None,
    )
    metadata = tokenizer.metadata_from_json(tiny("qwen2"), {"chat_template": named})
    assert tokenizer.from_metadata(metadata).chat_templates == {"default": "b", "tool_use": "a"}
    for wrong in (3, {"a": "b"}, ["a"], [{"name": "default"}], "\ud800"):
        with pytest.raises(jq.CheckpointError, match=r"tokenizer_config.json: chat_template"):
            template(wrong)


@pytest.mark.parametrize(
    ("step", "prefix"),
    [
        ({"prepend_scheme": "always", "split": False}, True),
        ({"prepend_scheme": "first", "split": False}, True),
        ({"prepend_scheme": "never", "split": False}, False),
        ({"add_prefix_space": True, "split": False}, True),
        ({}, True),
    ],
)
def test_metaspace(step: dict[str, Any], prefix: bool) -> None:
    """Words are split at spaces by default.

    This matters only if a token spans two words.
    """
    content = tiny("llama")
    content["normalizer"], content["pre_tokenizer"] = (
        None,
        {"type": "Metaspace", "replacement": "▁"} | step,
    )
    got = tokenizer.metadata_from_json(content)
    assert got["tokenizer.ggml.add_space_prefix"] is prefix
    library = tokenizers.Tokenizer.from_str(json.dumps(content))
    for text in ("Hello world", "the  cat", "木 x"):
        assert tokenizer.from_metadata(got).encode(text) == library.encode(text).ids
    content["model"]["vocab"]["▁a▁b"] = len(content["model"]["vocab"])
    if step.get("split", True):
        with pytest.raises(
            jq.CheckpointError, match=r"pre_tokenizer.split: is true, so that '▁a▁b' is never"
        ):
            tokenizer.metadata_from_json(content)


def test_spaces_that_are_split_at_after_they_were_written_otherwise() -> None:
    """Gemma's pre-tokenizer, which finds no space."""
    content = tiny("llama")
    content["normalizer"] = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    behavior = {"behavior": "MergedWithPrevious", "invert": False}
    content["pre_tokenizer"] = {"type": "Split", "pattern": {"String": " "}, **behavior}
    got = tokenizer.metadata_from_json(content)
    assert got["tokenizer.ggml.add_space_prefix"] is False
    library = tokenizers.Tokenizer.from_str(json.dumps(content))
    for text in ("Hello world", "the  cat", "木 x", " a"):
        assert tokenizer.from_metadata(got).encode(text) == library.encode(text).ids
    content["normalizer"] = None
    with pytest.raises(jq.CheckpointError, match="pre_tokenizer.type: 'Split' is not supported"):
        tokenizer.metadata_from_json(content)


def test_added_tokens_beyond_the_model_are_left_out() -> None:
    """Gemma 3 1B has no embedding row for the tokenizer's image token."""
    content = tiny("llama")
    size = len(read(content).vocabulary.tokens)
    token = {"id": size, "content": "<image>", "special": True}
    content["added_tokens"].append(content["added_tokens"][0] | token)
    with pytest.warns(UserWarning, match=f"'<image>' is left out: the id {size}"):
        assert read(content, vocab_size=size).vocab_size == size
    assert read(content).vocabulary.tokens[size] == "<image>"


def test_merges_that_scores_cannot_say() -> None:
    """A vocabulary trained by the library does not list every split of a token."""
    t = tokenizers.Tokenizer(bpe.BPE(byte_fallback=True))
    t.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    texts = [entry["text"] for entry in golden("llama-spm")]
    t.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=1000, special_tokens=special))
    with pytest.raises(
        jq.CheckpointError, match="model.merges: lacks '.*', which SentencePiece would merge to"
    ):
        tokenizer.metadata_from_json(json.loads(t.to_str()))


def test_the_first_merges_that_early_converters_left_out() -> None:
    """Merges of the token whose score is 0, as in OpenLLaMA's tokenizer.json."""
    content = tiny("llama")
    vocab, merges = content["model"]["vocab"], content["model"]["merges"]
    merged = sorted({vocab["".join(pair)] for pair in merges})
    first, second, *_ = merged
    content["model"]["merges"] = [pair for pair in merges if vocab["".join(pair)] != first]
    assert content["model"]["merges"] != merges
    scores = tokenizer.metadata_from_json(content)["tokenizer.ggml.scores"][merged]
    assert scores[0] == 0 and (np.diff(scores) < 0).all()
    content["model"]["merges"] = [
        pair for pair in merges if vocab["".join(pair)] not in (first, second)
    ]
    with pytest.raises(jq.CheckpointError, match="model.merges: lacks"):
        tokenizer.metadata_from_json(content)


def with_model(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda content: content["model"].update(changes)


def with_part(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda content: content.update(changes)


FLAGS = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)


def added(**token: Any) -> Callable[[dict[str, Any]], None]:
    return lambda content: content["added_tokens"].append(FLAGS | token)


def template_of(*pieces: str) -> Callable[[dict[str, Any]], None]:
    """A post-processor that puts tokens around the text, "$A"."""
    ids = {"<|im_end|>": 280, "<|endoftext|>": 281, "<|im_start|>": 282, "<far>": 999}
    tokens = {text: {"id": text, "ids": [i], "tokens": [text]} for text, i in ids.items()}
    kinds = {True: ("Sequence", "A"), False: ("SpecialToken", None)}
    single = [
        {kind: {"id": name or piece, "type_id": 0}}
        for piece in pieces
        for kind, name in [kinds[piece == "$A"]]
    ]
    pair = [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}]
    whole = {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": tokens}
    return with_part(post_processor=whole)


BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": True,
}
BAD = [
    (with_part(model=None), "model: is missing"),
    (with_part(model=[]), "model: must be an object, not an array"),
    (with_model(type="WordLevel"), "model.type: 'WordLevel' is not supported; supported: 'BPE'"),
    (with_model(type=3), "model.type: must be a string, not an integer"),
    (
        with_model(continuing_subword_prefix="##"),
        "model.continuing_subword_prefix: is not supported",
    ),
    (with_model(end_of_word_suffix="</w>"), "model.end_of_word_suffix: is not supported"),
    (with_model(dropout=0.1), "model.dropout: is not supported"),
    (
        with_model(vocab={}),
        "model.vocab: .* has id 280, expected less than 3, the number of tokens",
    ),
    (with_model(vocab=None), "model.vocab: is missing, expected an object"),
    (with_model(vocab={"a": -1}), "model.vocab: 'a' has id -1, expected an integer from 0"),
    (with_model(vocab={"a": True}), "model.vocab: 'a' has id True, expected an integer"),
    (with_model(vocab={"a": 0.0}), "model.vocab: 'a' has id 0.0, expected an integer"),
    (with_model(vocab={"a": 10**30}), "model.vocab: 'a' has id 1000"),
    (with_model(vocab={"a": 0, "b": 0}), "model.vocab: 'b' and 'a' both have id 0"),
    (with_model(vocab={"\ud800": 0}), "model.vocab: the token of id 0 holds a lone surrogate"),
    (with_model(vocab={"": 0}), "model.vocab: the token of id 0 is empty"),
    (with_model(merges=None), "model.merges: is missing, expected an array"),
    (
        with_model(merges=["ab"]),
        r"model.merges\[0\]: is 'ab', expected two tokens that form a third",
    ),
    (with_model(merges=["a b c"]), r"model.merges\[0\]: is 'a b c'"),
    (with_model(merges=[["a", "b", "c"]]), r"model.merges\[0\]: is \['a', 'b', 'c'\]"),
    (
        with_model(merges=[["a", "b"], 7]),
        r"model.merges\[0\]: is \['a', 'b'\], expected two tokens",
    ),
    (with_model(merges=[["a", 3]]), r"model.merges\[0\]"),
    (with_model(merges=["Z Z"]), r"model.merges\[0\]: is 'Z Z'"),
    (
        with_model(ignore_merges=True),
        "pre_tokenizer: splits by .* with ignore_merges=True, which has no name in GGUF",
    ),
    (added(id=5, content="<x>"), "model.vocab: '<x>' and '&' both have id 5"),
    (added(id=400, content="!"), r"added_tokens\[3\].id: is 400 for '!', which has id 0 already"),
    (
        added(id=400, content="<x>"),
        "model.vocab: '<x>' has id 400, expected less than 284, the number of tokens",
    ),
    (added(id=-1, content="<x>"), "model.vocab: '<x>' has id -1"),
    (added(content="<x>"), r"added_tokens\[3\].id: is missing"),
    (
        added(id=283, content="[PAD7]", special="yes"),
        r"added_tokens\[3\].special: must be a boolean",
    ),
    (with_part(added_tokens=[3]), r"added_tokens\[0\]: must be an object, not an integer"),
    (
        with_part(normalizer={"type": "Lowercase"}),
        "normalizer.type: 'Lowercase' before byte-level BPE has no name in GGUF",
    ),
    (
        with_part(pre_tokenizer=None),
        "normalizer.type: 'NFC' of this kind is not supported; expected spaces",
    ),
    (
        with_part(pre_tokenizer=None, normalizer=None),
        "normalizer: does not write spaces as '▁': neither",
    ),
    (
        with_part(pre_tokenizer={"type": "Whitespace"}, normalizer=None),
        "pre_tokenizer.type: 'Whitespace' is not supp",
    ),
    (
        with_part(pre_tokenizer=BYTE_LEVEL | {"add_prefix_space": True}),
        "pre_tokenizer.add_prefix_space: is true, which GGUF cannot express",
    ),
    (
        with_part(
            pre_tokenizer={
                "type": "Sequence",
                "pretokenizers": [split("a|b"), BYTE_LEVEL | {"add_prefix_space": True}],
            }
        ),
        r"pre_tokenizer.pretokenizers\[1\].add_prefix_space: is true",
    ),
    (
        with_part(
            pre_tokenizer={
                "type": "Sequence",
                "pretokenizers": [{"type": "Sequence", "pretokenizers": [BYTE_LEVEL]}],
            }
        ),
        r"pre_tokenizer.pretokenizers\[0\].type: a sequence in a sequence is not supported",
    ),
    (
        with_part(
            pre_tokenizer={
                "type": "Sequence",
                "pretokenizers": [split("x", "Removed"), BYTE_LEVEL],
            }
        ),
        r"pretokenizers\[0\].behavior: has no name in GGUF, expected 'Isolated'",
    ),
    (
        with_part(
            pre_tokenizer={
                "type": "Sequence",
                "pretokenizers": [DIGITS, BYTE_LEVEL, DIGITS],
            }
        ),
        r"pretokenizers\[1\].type: 'ByteLevel' has no name in GGUF here",
    ),
    (
        with_part(
            pre_tokenizer={
                "type": "Sequence",
                "pretokenizers": [split("x", "Isolated", True), BYTE_LEVEL],
            }
        ),
        r"pretokenizers\[0\].behavior: has no name in GGUF, expected 'Isolated', not inverted",
    ),
    (
        with_part(
            pre_tokenizer={
                "type": "Sequence",
                "pretokenizers": [{"type": "Digits", "individual_digits": False}, BYTE_LEVEL],
            }
        ),
        r"pretokenizers\[0\].type: 'Digits' has no name in GGUF here",
    ),
    (
        with_part(post_processor={"type": "None"}),
        "JSON: the tokenizers library fails: data did not",
    ),
    (template_of("$A", "$A"), "post_processor: must only add tokens before and"),
    (template_of("$A", "<gone>"), "post_processor: the tokenizers library fails: no entry found"),
    (template_of("<far>", "$A"), "post_processor: adds token 999, which is not in the vocabulary"),
    (
        with_part(pre_tokenizer=split("(a")),
        "JSON: the tokenizers library fails: Oniguruma error: end pattern with unmatched",
    ),
    (with_part(decoder={"type": "CTC"}), "decoder.type: 'CTC' of this kind is not supported"),
    *(
        (with_part(decoder={"type": "Replace", **step}), "decoder.type: 'Replace' of this kind")
        for step in (
            {"pattern": {"String": "a"}, "content": " "},
            {"pattern": {"String": "▁"}, "content": "_"},
        )
    ),
    (
        with_part(decoder={"type": "Strip", "content": " ", "start": 1, "stop": 1}),
        "decoder.type: 'Strip' of this kind",
    ),
    *(
        (with_part(decoder={"type": "Strip", "content": " ", **step}), f"decoder.{key}: is missing")
        for key, step in (("start", {"stop": 0}), ("stop", {"start": 1}))
    ),
]


@pytest.mark.parametrize(("damage", "message"), BAD, ids=[message[:60] for _, message in BAD])
def test_unsupported_tokenizers_are_refused(
    damage: Callable[[dict[str, Any]], None], message: str
) -> None:
    content = tiny("qwen2")
    damage(content)
    with pytest.raises(jq.CheckpointError, match=f"^tokenizer.json: .*{message}"):
        tokenizer.metadata_from_json(content, {"eos_token": "<|im_end|>"})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (with_model(byte_fallback=False), "model.byte_fallback: must be true"),
        (
            with_model(unk_token="<gone>"),
            "model.unk_token: is '<gone>', which is not in the vocabulary",
        ),
        (lambda content: content["model"]["merges"].pop(), "model.merges: lacks "),
        (lambda content: content["model"]["vocab"].pop("<0x0A>"), "model.vocab: "),
        (
            with_part(normalizer={"type": "Prepend", "prepend": "▁"}),
            "normalizer: does not write spaces as '▁'",
        ),
        (
            with_part(normalizer={"type": "Replace", "pattern": {"String": "a"}, "content": "▁"}),
            "normalizer.type: 'Replace' of this kind",
        ),
        (
            with_part(normalizer={"type": "Replace", "pattern": {"String": " "}, "content": "_"}),
            "normalizer.type: 'Replace' of this kind",
        ),
        (
            with_part(normalizer={"type": "Prepend", "prepend": "_"}),
            "normalizer.type: 'Prepend' of this kind",
        ),
        (
            with_part(pre_tokenizer={"type": "Metaspace", "replacement": "_"}),
            "pre_tokenizer.type: 'Metaspace' is not",
        ),
    ],
)
def test_sentencepiece_that_is_refused(
    damage: Callable[[dict[str, Any]], None], message: str
) -> None:
    content = tiny("llama")
    damage(content)
    with pytest.raises(jq.CheckpointError, match=f"^tokenizer.json: {message}"):
        tokenizer.metadata_from_json(content)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"eos_token": "", "bos_token": "<gone>"},
            "bos_token: is '<gone>', which is not in the vocabulary",
        ),
        ({"eos_token": {"id": 3}}, "eos_token.content: is missing, expected a string"),
        ({"unk_token": 3}, "unk_token: must be a string, not an integer"),
        ({"add_bos_token": 1}, "add_bos_token: must be a boolean"),
    ],
)
def test_settings_that_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(jq.CheckpointError, match=f"^tokenizer_config.json: {message}"):
        tokenizer.metadata_from_json(tiny("qwen2"), config)


JUNK = (
    None,
    True,
    -1,
    0,
    1,
    10**20,
    0.5,
    "",
    "a",
    "▁",
    "\udfff",
    [],
    {},
    ["a", "b"],
    {"type": "Sequence"},
    [[]],
)


def damaged(content: Any, rng: np.random.Generator) -> None:
    """Replaces, removes or duplicates one item at a random place, more likely near the top."""
    while True:
        keys = list(content) if isinstance(content, dict) else range(len(content))
        key = keys[rng.integers(len(keys))]
        inner = content[key]
        if isinstance(inner, (dict, list)) and inner and rng.random() < 0.8:
            content = inner
            continue
        kind = rng.integers(4)
        if kind == 0:
            del content[key]
        elif kind == 1 and isinstance(content, list):
            content.append(inner)
        else:
            content[key] = JUNK[rng.integers(len(JUNK))]
        return


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_damaged_files_are_refused_or_work(name: str) -> None:
    rng, worked = np.random.default_rng(1), 0
    original = (GOLDEN.parent / "checkpoints" / name / "tokenizer.json").read_text()
    for _ in range(400):
        content = json.loads(original)
        for _ in range(rng.integers(1, 3)):
            damaged(content, rng)
        try:
            metadata = tokenizer.metadata_from_json(content, vocab_size=400)
        except jq.CheckpointError as error:
            assert error.file.startswith("tokenizer") and error.field and error.problem
            continue
        worked += 1
        got = tokenizer.from_metadata(metadata)
        assert got.decode(got.encode("hello")).endswith("hello") and got.vocab_size == 400
    assert 20 < worked < 390


def test_phi_3s_tokens_swallow_white_space() -> None:
    """GGUF readers recognize them by the model's name, which is set if the flags are Phi-3's."""
    content = json.loads(tokenizer_json("phi-3"))
    for entry in content["added_tokens"]:
        entry["rstrip"] = entry["content"] not in ("<unk>", "<s>", "<|endoftext|>")
    metadata = tokenizer.metadata_from_json(content, {"eos_token": "<|endoftext|>"})
    assert metadata["general.name"] == "phi-3"
    text, got = "<|user|>\n Hello<|end|>\n\t<|assistant|>\n", tokenizer.from_metadata(metadata)
    want = load("phi-3").encode(text, parse_special=True)
    assert got.encode(text, parse_special=True) == want
    library = tokenizers.Tokenizer.from_str(json.dumps(content))
    assert library.encode(text).ids == want
    content["added_tokens"][3]["rstrip"] ^= True
    other = tokenizer.metadata_from_json(content, {"eos_token": "<|endoftext|>"})
    assert "general.name" not in other
