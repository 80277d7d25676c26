"""Constraints: which tokens they allow, and what is refused before anything runs."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.paths import GOLDEN

import jax_q4k as jq
from jax_q4k import models
from jax_q4k.models import tokenizer
from jax_q4k.models.sampling import Constraint, ConstraintError, Thought, grammars
from jax_q4k.models.sampling.grammars import Grammars, Matcher

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


#: Those of decoders: encoders' normalize a text.
VOCABULARIES = [
    file
    for file in sorted((GOLDEN.parent / "tokenizers").glob("*.gguf"))
    if jq.gguf.read_header(file).metadata["tokenizer.ggml.model"] not in ("bert", "t5")
]
COLOUR = Constraint.choice(["red", "blue"])


@pytest.fixture(scope="module")
def demo() -> models.Model:
    return models.load("demo")


def matcher_of(demo: models.Model, constraint: Constraint) -> Matcher:
    assert demo.grammars is not None
    return demo.grammars.matcher(constraint)


def allowed(matcher: Matcher, vocab: int) -> np.ndarray:
    """Returns which tokens may come next, bool (vocab,)."""
    mask = np.full(-(-vocab // 32), -1, np.int32)
    matcher.allow(mask)
    return np.unpackbits(mask.view(np.uint8), bitorder="little")[:vocab] > 0


def follows(demo: models.Model, constraint: Constraint, text: str) -> bool:
    """Returns whether a text has the form, token by token."""
    assert demo.tokenizer is not None
    matcher = matcher_of(demo, constraint)
    for token in demo.tokenizer.encode(text, add_special=False):
        if matcher.is_finished or not allowed(matcher, demo.config.vocab_size)[token]:
            return False
        matcher.push(token)
    ends = list(demo.tokenizer.eos_token_ids)
    return matcher.is_finished or bool(allowed(matcher, demo.config.vocab_size)[ends].all())


@pytest.mark.parametrize(
    ("constraint", "right", "wrong"),
    [
        (Constraint.json_schema(SCHEMA), '{"name": "Bo", "age": 3}', '{"age": 3, "name": "Bo"}'),
        (Constraint.json_schema('{"enum": ["é", 1, null]}'), '"é"', '"e"'),
        (Constraint.json_object(), '{"a":[1, {"b": null}]}', "[1]"),
        (Constraint.regex("[0-9]{3}-(a|b)+"), "123-ab", "12-ab"),
        (Constraint.choice(["red", 'a "b"\n\\']), 'a "b"\n\\', "blue"),
        (Constraint.grammar('root ::= "yes" | "no" [a-z]{2}'), "noab", "yes!"),
        (Constraint.grammar('start: "a" b* "."\nb: "b" | "c"'), "abcb.", "ad."),
        (COLOUR.following(Thought("</think>")), "I see.</think>\n\nred", "red"),
    ],
    ids=["schema", "enum", "object", "regex", "choice", "gbnf", "lark", "following"],
)
def test_forms(demo: models.Model, constraint: Constraint, right: str, wrong: str) -> None:
    assert follows(demo, constraint, right)
    assert not follows(demo, constraint, wrong)
    assert not follows(demo, constraint, right[:2])


@pytest.mark.parametrize("path", VOCABULARIES, ids=lambda path: path.stem)
def test_vocabularies(path: Path) -> None:
    """Forced texts are spelled in tokens of each kind of tokenizer, without an added space."""
    made = tokenizer.from_metadata(jq.gguf.read_header(path).metadata)
    vocabulary = grammars._Vocabulary(made)
    for text in (
        "a",
        " a",
        "hello world",
        '{"name": "',
        "é\n",
        "  x",
        "\n\n",
        "日本",
        "\\n",
        "1234",
    ):
        ids = vocabulary(text)
        assert b"".join(vocabulary.tokens[token] for token in ids) == text.encode()
        greedy = vocabulary._greedy(text.encode())
        assert b"".join(vocabulary.tokens[token] for token in greedy) == text.encode()
    matcher = Grammars(made, made.vocab_size).matcher(Constraint.regex("a+ (hello|world) é{2}"))
    for token in vocabulary("aaa hello éé"):
        assert allowed(matcher, made.vocab_size)[token]
        matcher.push(token)
    assert matcher.is_finished


@pytest.mark.parametrize("constraint", [COLOUR, Constraint.anything()])
def test_thoughts(demo: models.Model, constraint: Constraint) -> None:
    """An answer may begin with one; its budget forces its end."""
    words, vocab = demo.tokenizer, demo.config.vocab_size
    assert words is not None
    begin, other = (words.encode(text, add_special=False)[0] for text in ("<", "z"))
    thought = Thought(" end", begin=words.token(begin), budget=3)
    without = matcher_of(demo, constraint.following(thought))
    assert allowed(without, vocab)[begin]
    assert allowed(without, vocab)[other] == (constraint is not COLOUR)
    for token in words.encode("red", add_special=False):
        without.push(token)
    assert without.is_finished == (constraint is COLOUR)

    matcher = matcher_of(demo, constraint.following(thought))
    matcher.push(begin)
    for _ in range(3):
        may = allowed(matcher, vocab)
        assert may[other] and not may[list(words.eos_token_ids)].any()
        matcher.push(other)
    closing = []
    while forced := matcher.forced():
        (one,) = np.flatnonzero(allowed(matcher, vocab))
        assert one == forced[0]
        closing.append(int(one))
        matcher.push(int(one))
    assert words.decode(closing) == " end"
    assert allowed(matcher, vocab)[other] == (constraint is not COLOUR)
    with pytest.raises(ConstraintError, match="its thought is all"):
        inside = matcher_of(demo, constraint.following(Thought("x")))
        inside.push(words.eos_token_ids[0])


def test_forced_tokens_are_the_only_ones_allowed(demo: models.Model) -> None:
    """They stay the same however many of them were asked for at once."""
    text = "The moon and the seven stars"
    matcher = matcher_of(demo, Constraint.choice([text]))
    forced, tokens = matcher.forced(), list[int]()
    while not matcher.is_finished:
        (one,) = np.flatnonzero(allowed(matcher, demo.config.vocab_size))
        tokens.append(int(one))
        matcher.push(int(one))
    assert tokens[: len(forced)] == forced and len(forced) > 4
    assert demo.tokenizer is not None and demo.tokenizer.decode(tokens) == text


def test_an_answer_that_leaves_its_form(demo: models.Model) -> None:
    matcher = matcher_of(demo, Constraint.regex("a+"))
    assert demo.tokenizer is not None
    with pytest.raises(ConstraintError, match="the answer cannot satisfy its constraint"):
        matcher.push(demo.tokenizer.encode("b", add_special=False)[0])


def test_each_answer_has_a_state_of_its_own(demo: models.Model) -> None:
    constraint = Constraint.regex("ab")
    first, second = matcher_of(demo, constraint), matcher_of(demo, constraint)
    before = allowed(second, demo.config.vocab_size)
    assert demo.tokenizer is not None
    first.push(demo.tokenizer.encode("ab", add_special=False)[0])
    assert (allowed(second, demo.config.vocab_size) == before).all()


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        (Constraint.json_schema({"type": "foo"}), "json_schema: .*foo"),
        (Constraint.json_schema('{"type": '), "json_schema: "),
        (Constraint.json_schema("[]"), "json_schema: "),
        (Constraint.json_schema({"not": {"type": "string"}}), "json_schema: .*not"),
        (Constraint.json_schema({"x-guidance": {"lenient": True}, "not": {}}), "json_schema: "),
        (Constraint.json_schema({"$ref": "http://example.com/a"}), "json_schema: "),
        (Constraint.json_schema({"$ref": "file:///etc/passwd"}), "json_schema: "),
        (Constraint.json_schema({"type": "string", "pattern": "(?=a)b"}), "json_schema: "),
        (Constraint.regex("(a"), "regex: "),
        (Constraint.regex("(" * 30_000 + "a" + ")" * 30_000), "regex: "),
        (Constraint.grammar("root ::= missing"), "grammar: "),
        (Constraint.grammar("start: missing"), "grammar: "),
        (Constraint.grammar("start: " + "(" * 30_000), "grammar: "),
        (Constraint.grammar("root ::= " + "(" * 30_000), "grammar: "),
        (Constraint.grammar(""), "grammar: "),
    ],
)
def test_what_cannot_be_compiled(demo: models.Model, constraint: Constraint, message: str) -> None:
    """Each is refused in little time, and the library still works."""
    began = time.process_time()
    with pytest.raises(ConstraintError, match=message):
        matcher_of(demo, constraint)
    assert time.process_time() - began < 10
    assert follows(demo, Constraint.regex("a"), "a")


def test_deep_schemas(demo: models.Model) -> None:
    """They may be refused, but never end the process."""
    for depth in (20, 60, 200, 5_000):
        text = '{"items":' * depth + "{}" + "}" * depth
        try:
            matcher_of(demo, Constraint.json_schema(text))
        except ConstraintError:
            assert depth > 60


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Constraint.regex("a" * 270_000), ConstraintError, "262144 bytes"),
        (lambda: Constraint.regex(None), TypeError, "must be a text"),  # type: ignore[arg-type]
        (lambda: Constraint.choice([]), ConstraintError, "at least one text"),
        (lambda: Constraint.choice([""]), ConstraintError, "none that is empty"),
        (lambda: Constraint.choice("ab"), TypeError, "a list of texts"),
        (lambda: Constraint.json_schema({"enum": [float("nan")]}), ConstraintError, "JSON data"),
        (lambda: Thought(""), ConstraintError, "must not be empty"),
        (lambda: Thought("x", budget=-1), ConstraintError, "at least 0"),
        (lambda: models.Sampling(constraint="a"), TypeError, "must be a Constraint"),
    ],
)
def test_arguments(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    "pattern",
    [
        "(.*a){20}.*|" + "|".join(f".*{c}.{{{20 + i}}}" for i, c in enumerate("abcdefgh")),
        "(((a{1,1000}){1,1000}){1,1000}){1,1000}b",
        "((a*)*)*b",
    ],
)
def test_steps_that_are_complex(demo: models.Model, pattern: str) -> None:
    """They may fail with an error, in a bounded time."""
    began = time.process_time()
    try:
        matcher, chance = matcher_of(demo, Constraint.regex(pattern)), random.Random(0)
        for _ in range(60):
            matcher.push(chance.choice(np.flatnonzero(allowed(matcher, 4096)).tolist()))
    except ConstraintError:
        pass
    assert time.process_time() - began < 20


def test_without_the_library(demo: models.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    assert demo.tokenizer is not None
    fresh = Grammars(demo.tokenizer, demo.config.vocab_size)
    with pytest.raises(ImportError, match=r"pip install 'jax-q4k\[serve\]'"):
        fresh.matcher(Constraint.regex("a"))
    assert grammars.Matcher is Matcher
