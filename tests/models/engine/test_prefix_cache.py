"""Prefix cache: prompts that share a cached prefix get the tokens of a full prefill."""

from __future__ import annotations

from typing import Any

import pytest

import jax_q4k as jq
from jax_q4k import models
from jax_q4k.models.engine.conversation import Conversation
from jax_q4k.models.engine.plan import Plan
from jax_q4k.models.engine.pools import Hit, Pools
from jax_q4k.models.engine.stepper import Stepper

from ..golden_files import model, reference

pytestmark = pytest.mark.cpu_kernels

#: One model for each kind of cache: pages only, windows, soft caps, recurrent states, latent
#: vectors.
NAMES = ["llama-gqa", "gemma3", "qwen35", "lfm2", "deepseek2"]
RECURRENT = ["qwen35", "lfm2"]
FIELDS = {"max_new_tokens": 9, "ignore_end": True}


@pytest.mark.slow("compiles programs of two lengths")
@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("name", NAMES)
def test_a_text_goes_on(name: str) -> None:
    """Three prompts, each an extension of the text before; the KV cache grows meanwhile.

    Full pages are reused; with recurrent layers, up to the last page of the prompt before.
    """
    loaded, prefix = model(name), models.Prefix()
    tokens, reused = reference(name).prompt.tolist()[:5], []
    more = reference(name).prompt.tolist()
    for added in (3, 73, 7):
        tokens = tokens + (more * 9)[:added]
        whole = models.generate(loaded, tokens, **FIELDS)
        out = models.generate(loaded, tokens, prefix=prefix, **FIELDS)
        assert out.tokens == whole.tokens
        reused.append(out.timings.reused_tokens)
        assert prefix.tokens == (tokens + out.tokens)[:-1]  # the last is not computed yet
        tokens = tokens + out.tokens
    assert reused == ([0, 0, 80] if name in RECURRENT else [0, 16, 96])


@pytest.mark.slow("compiles several programs", quick=["llama-gqa"])
@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("name", ["llama-gqa", "qwen35", "gemma3"])
def test_a_text_that_differs(name: str) -> None:
    """Full pages before the first different token are reused, also behind windows and states."""
    loaded, prefix, prompt = model(name), models.Prefix(), reference(name).prompt.tolist()[:30]
    models.generate(loaded, prompt, prefix=prefix, **FIELDS)
    other = [*prompt[:20], *(token ^ 1 for token in prompt[20:28])]
    out = models.generate(loaded, other, prefix=prefix, **FIELDS)
    assert out.tokens == models.generate(loaded, other, **FIELDS).tokens
    assert out.timings.reused_tokens == 16 and prefix.tokens[: len(other)] == other


@pytest.mark.slow("compiles several programs")
@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("name", ["llama-gqa", "qwen35"])
def test_the_same_prompt_again(name: str) -> None:
    """The last token is always recomputed, because its logits give the next token."""
    loaded, prefix, prompt = model(name), models.Prefix(), list(range(5, 37))
    fields = FIELDS | {"temperature": 1.0, "repetition_penalty": 1.2, "dry_multiplier": 0.5}
    fields |= {"dry_sequence_breakers": (), "logprobs": 2, "draft": "lookup"}
    first = models.generate(loaded, prompt, prefix=prefix, **fields)
    again = models.generate(loaded, prompt, prefix=prefix, **fields)
    assert again.tokens == first.tokens and again.timings.reused_tokens == 16
    longer = prompt + first.tokens
    out = models.generate(loaded, longer, prefix=prefix, **fields)
    assert out.tokens == models.generate(loaded, longer, **fields).tokens
    assert out.timings.reused_tokens == (16 if name in RECURRENT else 32)


@pytest.mark.slow("compiles several programs")
@pytest.mark.usefixtures("exact")
def test_calls_that_a_prefix_does_not_fit() -> None:
    """Another model, another dtype or a draft model: nothing is reused."""
    prefix, prompt = models.Prefix(), list(range(5, 25))
    models.generate(model("llama-gqa"), prompt, prefix=prefix, **FIELDS)
    other = models.generate(model("qwen2-bias"), prompt, prefix=prefix, **FIELDS)
    assert other.timings.reused_tokens == 0 and prefix.tokens[:20] == prompt
    half = models.generate(
        model("qwen2-bias"), prompt, prefix=prefix, cache_dtype="bfloat16", **FIELDS
    )
    assert half.timings.reused_tokens == 0
    tokens = list(prefix.tokens)
    drafted = models.generate(
        model("llama-gqa"), prompt, prefix=prefix, draft=model("llama-gqa"), **FIELDS
    )
    assert drafted.timings.reused_tokens == 0 and prefix.tokens == tokens
    with pytest.raises(ValueError, match="prefix takes one prompt, not 2"):
        models.generate(model("llama-gqa"), [prompt, prompt], prefix=prefix)
    prefix.clear()
    assert prefix.tokens == [] and prefix.capacity == 0


@pytest.mark.usefixtures("exact")
def test_a_stream_that_is_left() -> None:
    """Tokens computed before the stream was closed stay in the cache."""
    loaded, prefix = model("llama-gqa"), models.Prefix()
    pieces = models.stream(loaded, [5, 6, 7, 8], prefix=prefix, max_new_tokens=40)
    taken = [next(pieces).token for _ in range(5)]
    assert prefix.tokens == []
    pieces.close()
    assert prefix.tokens[:8] == [5, 6, 7, 8, *taken[:4]]


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("calls", [1, 2, 3])
def test_an_interrupt_between_and_within_pieces(
    monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    """A prefix never keeps a KV cache that was donated to a step."""
    loaded, prompt = model("llama-gqa"), (reference("llama-gqa").prompt.tolist() * 10)[:310]
    prefix = models.Prefix()
    models.generate(loaded, prompt[:50], prefix=prefix, **FIELDS)
    dispatch, seen = Stepper.dispatch, []

    def interrupted(stepper: Stepper, plan: Plan) -> Any:
        before = stepper.executor.state
        ticket = dispatch(stepper, plan)
        seen.append(plan)
        if len(seen) == calls:
            stepper.executor.state = before  # an interrupt comes before the new state is stored
            raise KeyboardInterrupt
        return ticket

    with monkeypatch.context() as patched:
        patched.setattr(Stepper, "dispatch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            models.generate(loaded, prompt, prefix=prefix, **FIELDS)
    assert len(seen) == calls and prefix.tokens == []
    out = models.generate(loaded, prompt, prefix=prefix, **FIELDS)
    assert out.tokens == models.generate(loaded, prompt, **FIELDS).tokens


@pytest.mark.slow("compiles a program a message")
@pytest.mark.usefixtures("exact")
def test_a_conversation_computes_each_message_once() -> None:
    demo = models.load("demo")
    talk, anew = Conversation(demo), Conversation(demo)
    options = {"max_new_tokens": 12, "temperature": 0.5}
    before = 0
    for message in ("How are you?", "And your sister?", "Good night."):
        out = talk.answer(message, seed=3, **options)
        anew.prefix.clear()
        assert anew.answer(message, seed=3, **options).text == out.text
        assert talk.turns == anew.turns and talk.turns[-1]["content"] == out.text.strip()
        assert out.timings.reused_tokens >= before // 16 * 16
        before = out.timings.prompt_tokens


def test_a_conversation_whose_answer_is_left() -> None:
    talk = Conversation(models.load("demo"))
    pieces = talk.stream("How are you?", max_new_tokens=60, ignore_end=True)
    assert talk.turns == []
    text = "".join(next(pieces).text for _ in range(6))
    pieces.close()
    assert [turn["role"] for turn in talk.turns] == ["user", "assistant"]
    assert talk.turns[-1]["content"] == text.strip()
    with pytest.raises(ValueError, match="temperature"):
        talk.answer("x", temperature=-1)
    assert len(talk.turns) == 2


@pytest.mark.slow("compiles by two implementations")
@pytest.mark.usefixtures("exact")
def test_another_implementation_computes_its_own() -> None:
    """A KV cache computed by plain JAX differs from that of the CPU kernels."""
    loaded, prefix = model("llama-gqa"), models.Prefix()
    prompt = reference("llama-gqa").prompt.tolist()
    models.generate(loaded, prompt[:20], prefix=prefix, **FIELDS)
    with jq.implementation("xla", activations="f32"):
        out = models.generate(loaded, prompt, prefix=prefix, **FIELDS)
        assert out.timings.reused_tokens == 0
        assert models.generate(loaded, prompt, prefix=prefix, **FIELDS).timings.reused_tokens


@pytest.mark.usefixtures("exact")
def test_a_prefix_in_two_threads_serves_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that ends while another inspects the cache; neither gets the other's text."""
    loaded, prefix = model("llama-gqa"), models.Prefix()
    prompt = reference("llama-gqa").prompt.tolist()
    others = [5, 6, 7, 8, *prompt[4:40]]
    want = models.generate(loaded, prompt, **FIELDS).tokens
    models.generate(loaded, prompt[:30], prefix=prefix, **FIELDS)
    hit = Pools.hit

    def meanwhile(pools: Pools, sequence: Any) -> Hit:
        found = hit(pools, sequence)
        with monkeypatch.context() as patched:
            patched.setattr(Pools, "hit", hit)
            models.generate(loaded, others, prefix=prefix, **FIELDS)
        return found

    with monkeypatch.context() as patched:
        patched.setattr(Pools, "hit", meanwhile)
        assert models.generate(loaded, prompt, prefix=prefix, **FIELDS).tokens == want
