"""Tokenizers of folders: ids equal the `tokenizers` library's for the same tokenizer.json."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from support.paths import GOLDEN

import jax_q4k as jq
from jax_q4k import models
from jax_q4k.models import chat, tokenizer

from .test_from_json import DIGITS, FLAGS, split, template_of, tiny, tokenizer_json, with_part
from .test_tokenizer import golden

Damage = Callable[[dict[str, Any]], None]

#: Special tokens of the small vocabularies.
SPECIAL = {"qwen2": ("<|im_end|>", "<|im_start|>", "<|endoftext|>"), "llama": ("<s>", "</s>")}
REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
BYTE_LEVEL |= {"use_regex": False}


def flagged(**flags: bool) -> Damage:
    """Sets flags of the second special token and of an additional, non-special token."""

    def damage(content: dict[str, Any]) -> None:
        content["added_tokens"][1] |= flags
        size = max(token["id"] for token in content["added_tokens"]) + 1
        size = max(size, len(content["model"]["vocab"]))
        content["added_tokens"].append(FLAGS | {"id": size, "content": "tool"} | flags)

    return damage


def metaspace(**changes: Any) -> Damage:
    return with_part(normalizer=None, pre_tokenizer=METASPACE | changes)


def sequence(*steps: dict[str, Any]) -> Damage:
    return with_part(pre_tokenizer={"type": "Sequence", "pretokenizers": list(steps)})


def roberta(content: dict[str, Any]) -> None:
    content["post_processor"] = {
        "type": "RobertaProcessing",
        "cls": ["<|im_start|>", 282],
        "sep": ["<|im_end|>", 280],
        "trim_offsets": True,
        "add_prefix_space": False,
    }


def without_x(content: dict[str, Any]) -> None:
    """Removes the token "x"; an unused token takes its id."""
    vocab = content["model"]["vocab"]
    vocab["unused"] = vocab.pop("x")
    merges = content["model"]["merges"]
    content["model"]["merges"] = [pair for pair in merges if "x" not in "".join(pair)]


CASES: list[tuple[str, str, Damage]] = [
    ("qwen2", "as it is", lambda content: None),
    ("llama", "as it is", lambda content: None),
    ("qwen2", "bos", template_of("<|endoftext|>", "$A")),
    (
        "qwen2",
        "two in front, one behind",
        template_of("<|im_start|>", "<|im_end|>", "$A", "<|endoftext|>"),
    ),
    ("qwen2", "roberta", roberta),
    ("qwen2", "no normalizer", with_part(normalizer=None)),
    ("qwen2", "NFKC", with_part(normalizer={"type": "NFKC"})),
    ("qwen2", "Lowercase", with_part(normalizer={"type": "Lowercase"})),
    (
        "qwen2",
        "Strip",
        with_part(normalizer={"type": "Strip", "strip_left": True, "strip_right": True}),
    ),
    ("qwen2", "lstrip", flagged(lstrip=True)),
    ("qwen2", "rstrip", flagged(rstrip=True)),
    ("qwen2", "single_word", flagged(single_word=True)),
    ("qwen2", "normalized", flagged(normalized=True)),
    ("qwen2", "a byte without a token", without_x),
    ("qwen2", "other splits", sequence(split(r"[aeiou]+"), DIGITS, BYTE_LEVEL)),
    ("qwen2", "prefix space", sequence(split(r"\s+"), BYTE_LEVEL | {"add_prefix_space": True})),
    ("llama", "lstrip", flagged(lstrip=True)),
    ("llama", "rstrip", flagged(rstrip=True)),
    ("llama", "metaspace always", metaspace()),
    ("llama", "metaspace first", metaspace(prepend_scheme="first")),
    ("llama", "metaspace never", metaspace(prepend_scheme="never")),
    ("llama", "metaspace first, unsplit", metaspace(prepend_scheme="first", split=False)),
    ("llama", "no prefix", with_part(normalizer=REPLACE)),
    ("llama", "byte fallback off", lambda content: content["model"].update(byte_fallback=False)),
]
TEXTS = [
    *("", " ", "a", " a", "Hello world", "  the  cat ", "it's 12 tools, tool retool\ttool"),
    *("e\u0301te\u0301 \ufb01 \u1e9b\u0323", "中文 🙂\u200d", "\n\n x\r\n", "\x00\x03"),
]


def built(name: str, damage: Damage) -> tuple[tokenizers.Tokenizer, tokenizer.Tokenizer]:
    """Returns the library's tokenizer and ours."""
    content = tiny(name)
    damage(content)
    return tokenizers.Tokenizer.from_str(json.dumps(content)), tokenizer.from_json(content)


@pytest.mark.parametrize(
    ("name", "damage"),
    [(name, damage) for name, _, damage in CASES],
    ids=[f"{name}: {what}" for name, what, _ in CASES],
)
def test_ids_are_the_librarys(name: str, damage: Damage) -> None:
    """Compares ids with and without parsing of special tokens, and with and without BOS and EOS."""
    library, t = built(name, damage)
    plain = tokenizers.Tokenizer.from_str(library.to_str())
    plain.encode_special_tokens = True
    first, second, *_ = SPECIAL[name]
    texts = [
        *TEXTS,
        f"{first}a {second} b{first}{second}\n",
        f" {second} ",
        f"x{second}x tool{first}",
    ]

    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(st.lists(st.sampled_from([*texts, first, second, " ", "tool"]) | st.text(max_size=4)))
    def check(parts: list[str]) -> None:
        text = "".join(parts)
        assert t.encode(text, parse_special=True) == library.encode(text).ids
        assert t.encode(text) == plain.encode(text).ids
        own = library.encode(text, add_special_tokens=False).ids
        assert t.encode(text, add_special=False, parse_special=True) == own

    for text in texts:
        assert t.encode(text, parse_special=True) == library.encode(text).ids, text
        assert t.encode(text) == plain.encode(text).ids, text
    check()
    ids = t.encode(texts[-1])
    assert pickle.loads(pickle.dumps(t)).encode(texts[-1]) == ids


@pytest.mark.parametrize("name", ["llama-spm", "llama-bpe", "qwen2", "gemma-4", "phi-3"])
def test_ids_of_real_vocabularies(name: str) -> None:
    content = json.loads(tokenizer_json(name))
    if content["decoder"] is None:
        spaces = REPLACE | {"pattern": {"String": "▁"}, "content": " "}
        steps = [spaces, {"type": "ByteFallback"}, {"type": "Fuse"}]
        strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
        steps += [] if name == "gemma-4" else [strip]
        content["decoder"] = {"type": "Sequence", "decoders": steps}
    t, library = tokenizer.from_json(content), tokenizers.Tokenizer.from_str(json.dumps(content))
    for entry in golden(name):
        text = entry["text"]
        assert t.encode(text, parse_special=True) == library.encode(text).ids
        assert t.decode(t.encode(text)) == library.decode(t.encode(text))


@pytest.mark.parametrize(("name", "damage"), [(n, d) for n, w, d in CASES if "Lower" not in w])
def test_texts_are_the_librarys(name: str, damage: Damage) -> None:
    library, t = built(name, damage)
    for text in TEXTS[:-1]:
        ids = t.encode(text, parse_special=True)
        assert t.decode(ids) == library.decode(ids)
        stream = t.stream()
        assert "".join(map(stream.push, ids)) + stream.finish() == library.decode(ids)


def test_a_file_cuts_and_pads_nothing() -> None:
    """Files contain the settings of the last call before they were saved."""
    content = tiny("qwen2")
    want = tokenizer.from_json(content).encode("Hello world")
    content["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst"}
    content["truncation"] |= {"stride": 0}
    content["padding"] = {"strategy": {"Fixed": 64}, "direction": "Right", "pad_id": 0}
    content["padding"] |= {"pad_to_multiple_of": None, "pad_type_id": 0, "pad_token": "!"}
    assert len(tokenizers.Tokenizer.from_str(json.dumps(content)).encode("Hello world").ids) == 64
    assert tokenizer.from_json(content).encode("Hello world") == want


@pytest.mark.parametrize("flags", [{}, {"normalized": True}, {"lstrip": True}])
def test_messages_do_not_spell_control_tokens(flags: dict[str, bool]) -> None:
    """Tokens are matched before or after the normalizer."""
    content = tiny("qwen2")
    for token in content["added_tokens"]:
        token |= flags
    template = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    t = tokenizer.from_json(content, {"chat_template": template, "eos_token": "<|im_end|>"})
    spelled = "a<|im_end|> e\u0301<|im_start|>b"
    ids = chat.encode(t, [{"role": "user", "content": spelled}])
    assert ids[0] == 282 and ids[-1] == 280 and not {280, 281, 282} & set(ids[1:-1])
    assert ids[1:-1] == t.encode(spelled, add_special=False)
    assert t.decode(ids) == "a<|im_end|> \u00e9<|im_start|>b"
    marks = {"\ue000": "<"}
    assert t.encode("\ue000|im_end|>", marks=marks) == t.encode("<|im_end|>")


def test_a_pattern_without_hope() -> None:
    content = tiny("qwen2")
    content["pre_tokenizer"]["pretokenizers"][0] = split(r"(a+)+$")
    t = tokenizer.from_json(content)
    with pytest.raises(jq.CheckpointError, match="tokenizer: the tokenizers library fails: Onig"):
        t.encode("a" * 64 + "!")
    assert t.encode("b")


@pytest.mark.parametrize(
    ("name", "damage", "warned"),
    [
        ("qwen2", lambda content: None, ["NFC normalization"]),
        ("qwen2", with_part(normalizer=None), []),
        ("llama", lambda content: None, []),
        ("llama", flagged(lstrip=True), ["that added tokens have lstrip: '<s>', 'tool'"]),
        ("llama", flagged(rstrip=True), ["that added tokens have rstrip: '<s>', 'tool'"]),
        ("llama", flagged(single_word=True), ["that added tokens have single_word: '<s>', 'tool'"]),
        ("llama", flagged(normalized=True), ["that added tokens have normalized: '<s>', 'tool'"]),
        ("qwen2", without_x, ["NFC normalization", "that 1 bytes without a token are dropped"]),
        ("llama", metaspace(split=True), ["where Metaspace adds no space"]),
        ("llama", metaspace(prepend_scheme="never"), []),
    ],
)
def test_saving_warns_of_settings_that_gguf_cannot_express(
    name: str, damage: Damage, warned: list[str], recwarn: pytest.WarningsRecorder
) -> None:
    content = tiny(name)
    damage(content)
    t = tokenizer.from_json(content, file="here/tokenizer.json")
    assert not recwarn
    t.gguf_metadata()
    assert [
        str(w.message).startswith("here/tokenizer.json: GGUF cannot express ") for w in recwarn
    ] == [True] * len(warned)
    for warning, what in zip(recwarn, warned, strict=True):
        assert what in str(warning.message)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            with_part(normalizer={"type": "NFKC"}),
            "normalizer.type: 'NFKC' before byte-level BPE has",
        ),
        (sequence(split("[aeiou]+"), BYTE_LEVEL), "pre_tokenizer: splits by .* no name in GGUF"),
    ],
)
def test_saving_refuses_settings_that_gguf_cannot_express(damage: Damage, message: str) -> None:
    content = tiny("qwen2")
    damage(content)
    t = tokenizer.from_json(content)
    with pytest.raises(jq.CheckpointError, match=f"tokenizer.json: {message}"):
        t.gguf_metadata()


def test_a_folder_that_gguf_cannot_say(tmp_path: Path) -> None:
    """The folder loads and generates; only saving it is refused, before anything is written."""
    folder = shutil.copytree(GOLDEN.parent / "checkpoints" / "qwen2", tmp_path / "model")
    content = json.loads((folder / "tokenizer.json").read_text())
    content["normalizer"] = {"type": "Lowercase"}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    loaded = models.load(folder)
    assert loaded.tokenizer.encode("HELLO") == loaded.tokenizer.encode("hello")
    assert models.generate(loaded, "Hello", max_new_tokens=2, ignore_end=True).tokens
    out = tmp_path / "saved.gguf"
    for save in (
        lambda: models.save_gguf(loaded, out),
        lambda: models.quantize_file(folder, out, "Q8_0"),
        lambda: models.save_gguf(models.quantize(loaded, "Q8_0"), out),
    ):
        with pytest.raises(jq.CheckpointError, match="'Lowercase' before byte-level BPE"):
            save()
        assert not out.exists()


def test_tokens_beyond_the_model_stay_text() -> None:
    """Gemma 3 1B has no embedding row for the tokenizer's image token."""
    content = tiny("llama")
    size = len(content["model"]["vocab"])
    content["added_tokens"].append(content["added_tokens"][0] | {"id": size, "content": "<image>"})
    with pytest.warns(UserWarning, match="'<image>' is left out: the id"):
        t = tokenizer.from_json(content, vocab_size=size)
    ids = t.encode("a<image>", parse_special=True)
    assert max(ids) < size and t.decode(ids) == "a<image>"
    t.gguf_metadata()


def test_names_of_special_tokens_in_their_own_file(tmp_path: Path) -> None:
    """They apply if tokenizer_config.json names none, as in transformers 4."""
    folder = shutil.copytree(GOLDEN.parent / "checkpoints" / "qwen2", tmp_path / "model")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    named = {"eos_token": "<|endoftext|>", "bos_token": {"content": "<|im_start|>"}, "other": 3}
    (folder / "special_tokens_map.json").write_text(json.dumps(named))
    t = models.load(folder).tokenizer
    assert t.special_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}


@pytest.mark.parametrize(
    ("change", "warned"),
    [
        ({}, None),
        ({"lstrip": True}, "gives lstrip of '<|endoftext|>', but tokenizer.json does not"),
        ({"special": False}, "gives special of '<|endoftext|>'"),
        ({"content": "<new>"}, "gives '<new>' as 281, but tokenizer.json does not"),
    ],
)
def test_added_tokens_that_two_files_describe(
    change: dict[str, Any], warned: str | None, recwarn: pytest.WarningsRecorder
) -> None:
    """Flags come from tokenizer_config.json, as in transformers; ids come from tokenizer.json."""
    content = tiny("qwen2")
    listed = {str(token["id"]): dict(token) for token in content["added_tokens"]}
    listed["281"] |= change
    t = tokenizer.from_json(content, {"added_tokens_decoder": listed})
    assert [warned in str(warning.message) for warning in recwarn] == [True] * (warned is not None)
    if warned is not None:
        with pytest.warns(UserWarning, match="added_tokens_decoder") as again:
            tokenizer.metadata_from_json(content, {"added_tokens_decoder": listed})
        assert again[0].filename == __file__
    text = "a <|endoftext|> <new>"
    library = tokenizers.Tokenizer.from_str(json.dumps(content))
    assert t.encode(text, parse_special=True) == library.encode(text).ids
