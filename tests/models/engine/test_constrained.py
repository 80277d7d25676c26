"""Answers with constraints: their form, beside other requests, cached, preempted, cancelled."""

from __future__ import annotations

import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import gguf
import pytest

import jax_q4k as jq
from jax_q4k import models
from jax_q4k.models import tokenizer
from jax_q4k.models.engine.loop import EngineLoop
from jax_q4k.models.sampling import Constraint, ConstraintError, Thought

from .. import golden_files
from .engine_runs import bits_of, exactly, is_idle, wait_until

OBJECT = Constraint.json_schema(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 6},
            "tags": {"type": "array", "items": {"enum": ["new", "old"]}, "maxItems": 2},
        },
        "required": ["name", "tags"],
        "additionalProperties": False,
    }
)
NUMBER = Constraint.regex("[1-9][0-9]{2,5}")
#: A text of many tokens, all of which are forced.
LONG = Constraint.choice(["This is the only thing that may be said."])
OPTIONS: dict[str, Any] = {"max_new_tokens": 120, "temperature": 1.0}


@pytest.fixture(scope="module")
def demo() -> models.Model:
    return models.load("demo")


def with_bytes(name: str) -> models.Model:
    """Returns a golden model whose first tokens are bytes."""
    loaded = golden_files.model(name)
    bytes_to_text = tokenizer.tokenizer._byte_alphabet()
    texts = sorted(bytes_to_text, key=bytes_to_text.__getitem__)
    rest = [f"<|{i}|>" for i in range(loaded.config.vocab_size - len(texts))]
    types = [gguf.TokenType.NORMAL] * len(texts) + [gguf.TokenType.CONTROL] * len(rest)
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*texts, *rest],
        "tokenizer.ggml.token_type": [int(kind) for kind in types],
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.eos_token_id": len(texts),
    }
    made = tokenizer.from_metadata(jq.gguf.Metadata(metadata))
    return models.Model(loaded.parts(), made, loaded.metadata)


def fits(constraint: Constraint, output: models.Output) -> bool:
    """Returns whether a finished text has its form."""
    assert output.text is not None
    if constraint is OBJECT:
        found = json.loads(output.text)
        return list(found) == ["name", "tags"] and {*found["tags"]} <= {"new", "old"}
    pattern = NUMBER.source if constraint is NUMBER else re.escape(json.loads(LONG.source)[0])
    return re.fullmatch(pattern, output.text) is not None


def check(constraint: Constraint, output: models.Output) -> None:
    assert output.finish_reason == "end"
    assert fits(constraint, output), output.text


@pytest.mark.parametrize("constraint", [OBJECT, NUMBER, LONG], ids=["object", "number", "long"])
def test_generate_and_engines_give_the_same(demo: models.Model, constraint: Constraint) -> None:
    options = OPTIONS | {"constraint": constraint}
    with jq.implementation(activations="f32"):
        want = [models.generate(demo, "The sea", seed=seed, **options) for seed in (1, 2)]
        *_, last = models.stream(demo, "The sea", seed=1, **options)
    assert last.output is not None and bits_of(last.output) == bits_of(want[0])
    for output in want:
        check(constraint, output)
    with exactly(demo, few_programs=True, max_context=160) as engine:
        got = [engine.generate("The sea", seed=seed, **options) for seed in (1, 2)]
        assert list(map(bits_of, got)) == list(map(bits_of, want))
        engine.check()
        wait_until(lambda: is_idle(engine))


def test_forced_tokens_take_few_steps(demo: models.Model) -> None:
    with exactly(demo, few_programs=True, max_context=160) as engine:
        before = engine.stats().steps
        output = engine.generate("The sea", constraint=LONG)
        check(LONG, output)
        assert len(output.tokens) > 8 and engine.stats().steps - before <= 4
        # Their log-probabilities are reported if they are asked for, and the tokens are the same.
        other = engine.generate("The sea", constraint=LONG, logprobs=1)
        assert other.tokens == output.tokens and other.logprobs is not None
        assert len(other.logprobs) == len(other.tokens)
        assert all(entry.logprob < 0 for entry in other.logprobs)


@pytest.mark.parametrize("name", ["lfm2", "gemma3"])
def test_layers_with_states_and_windows(name: str) -> None:
    """Prefilled forced tokens give the same answer as those that steps store one by one."""
    loaded = with_bytes(name)
    pattern = "(The moon rose over|A cold wind blew from) the (sea|hill): [a-e]{4}"
    options: Any = {"constraint": Constraint.regex(pattern), "max_new_tokens": 60, "seed": 3}
    prompt = [*range(40, 80)]
    with jq.implementation(activations="f32"):
        want = models.generate(loaded, prompt, temperature=1.0, **options)
    with exactly(loaded, few_programs=True, max_context=128) as engine:
        before = engine.stats().steps
        got = engine.generate(prompt, temperature=1.0, **options)
        assert engine.stats().steps - before < len(got.tokens) - 10
    assert got.tokens == want.tokens and re.fullmatch(pattern, got.text or "")


@pytest.mark.slow("compiles programs of sixteen rows")
def test_other_requests_get_their_own_bits(demo: models.Model) -> None:
    """Deterministic: plain and constrained requests, alone, together, cached, and preempted."""
    kinds = (None, OBJECT, None, NUMBER, LONG, None, OBJECT, None)
    prompts = [f"The {word} of the" for word in "sea moon man end day way sun king".split()]
    samplings = [
        models.Sampling(**OPTIONS, seed=i, constraint=kind, ignore_end=True, logprobs=i % 2)
        for i, kind in enumerate(kinds)
    ]
    small: Any = {"max_rows": 4, "max_context": 160, "warm_up": False, "deterministic": True}
    with models.Engine(demo, **small) as engine:
        pairs = list(zip(prompts, samplings, strict=True))
        want = [bits_of(engine.generate(*pair)) for pair in pairs]
        for output, kind in zip(want, kinds, strict=True):
            if kind is not None:
                check(kind, output)
        assert list(map(bits_of, engine.generate(prompts, samplings))) == want
        engine.check()
    with models.Engine(demo, **small, pages=12) as engine:
        assert list(map(bits_of, engine.generate(prompts, samplings))) == want
        assert engine.stats().preemptions > 0
        engine.check()


def test_penalties_and_filters(demo: models.Model) -> None:
    """They apply to the tokens that are allowed."""
    with exactly(demo, max_context=160) as engine:
        options: Any = {"temperature": 1.5, "top_k": 3, "frequency_penalty": 1.0, "min_p": 0.05}
        output = engine.generate("One", max_new_tokens=120, constraint=OBJECT, **options)
        check(OBJECT, output)
        check(LONG, engine.generate("One", constraint=LONG, repetition_penalty=1.3))
        biased = engine.generate("One", constraint=NUMBER, logit_bias={0: 50.0})
        check(NUMBER, biased)


def test_the_form_begins_behind_a_thought(demo: models.Model) -> None:
    thought = Constraint.choice(["red", "blue"]).following(Thought("and"))
    with exactly(demo, few_programs=True, max_context=160) as engine:
        output = engine.generate("He went", constraint=thought, max_new_tokens=40)
    assert output.finish_reason == "end" and output.text is not None
    before, _, rest = output.text.partition("and")
    assert before and re.fullmatch(r"\s{0,4}(red|blue)", rest)


def test_answers_that_end_early(demo: models.Model) -> None:
    """Ends an answer by a stop string, by its length, and by cancelling it."""
    with exactly(demo, few_programs=True, max_context=160) as engine:
        stopped = engine.generate("A", constraint=LONG, stop="thing")
        assert stopped.finish_reason == "stop" and stopped.text == "This is the only "
        short = engine.generate("A", constraint=LONG, max_new_tokens=3)
        assert short.finish_reason == "length" and len(short.tokens) == 3
        endless = Constraint.regex("[a-z ]*")
        request = engine.submit("A", constraint=endless, max_new_tokens=50, ignore_end=True)
        next(iter(request))
        assert request.cancel() and request.result().finish_reason == "cancelled"
        wait_until(lambda: is_idle(engine))
        engine.check()


def test_a_context_shift(demo: models.Model) -> None:
    with exactly(demo, few_programs=True, max_context=32) as engine:
        output = engine.generate(
            "A",
            constraint=Constraint.regex("(one [a-f]{8}, ){5}end"),
            shift=models.ContextShift(),
            max_new_tokens=80,
            temperature=1.0,
        )
    assert re.fullmatch("(one [a-f]{8}, ){5}end", output.text or "") and len(output.tokens) > 32


def test_an_answer_goes_on_after_an_interrupt(demo: models.Model, monkeypatch: Any) -> None:
    """Ctrl-C ends the call that drives; the state of another thread's answer is made again."""
    options = OPTIONS | {"constraint": OBJECT, "seed": 5}
    want = models.generate(demo, "A", **options)
    hand_out, calls, both = EngineLoop._hand_out, [0], threading.Barrier(2)

    def interrupted(loop: EngineLoop, ticket: Any) -> None:
        hand_out(loop, ticket)
        is_main = threading.current_thread() is threading.main_thread()
        calls[0] += is_main
        if is_main and calls[0] == 6:
            raise KeyboardInterrupt

    def other() -> models.Output:
        both.wait()
        return models.generate(demo, "A", **options)

    monkeypatch.setattr(EngineLoop, "_hand_out", interrupted)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(other)
        both.wait()
        with pytest.raises(KeyboardInterrupt):
            for _ in models.stream(demo, "The sea", max_new_tokens=400):
                pass
        assert running.result(60).text == want.text


def test_what_is_refused(demo: models.Model) -> None:
    """Before anything runs."""
    bad = Constraint.json_schema({"type": "foo"})
    with exactly(demo, few_programs=True, max_context=160) as engine:
        with pytest.raises(ConstraintError, match="foo"):
            engine.submit("A", constraint=bad)
        assert not engine.stats().waiting and not engine.stats().steps
    with pytest.raises(ConstraintError, match="foo"):
        models.generate(demo, "A", constraint=bad)
    with pytest.raises(ValueError, match="needs a tokenizer"):
        models.generate(golden_files.model("llama-gqa"), [1], constraint=NUMBER)


def test_an_answer_that_cannot_go_on(demo: models.Model) -> None:
    """It fails alone."""
    with exactly(demo, few_programs=True, max_context=160) as engine:
        impossible = Constraint.json_schema({"$ref": "#/$defs/a", "$defs": {"a": {"enum": [1]}}})
        other = engine.submit("The sea", max_new_tokens=20)
        assert demo.tokenizer is not None
        texts = map(demo.tokenizer.token_bytes, range(demo.config.vocab_size))
        nothing = {i: float("-inf") for i, text in enumerate(texts) if text.isupper()}
        with pytest.raises(ConstraintError, match="the answer cannot satisfy its constraint"):
            engine.generate("A", constraint=Constraint.regex("[A-Z]{5}"), logit_bias=nothing)
        assert other.result().finish_reason == "length"
        check_one = engine.generate("A", constraint=impossible)
        assert check_one.text == "1"
        engine.check()
