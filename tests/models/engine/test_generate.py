import dataclasses
import gc
import json
import math
import random
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.paths import GOLDEN

import jax_q4k as jq
from jax_q4k import Selection, current_selection, models
from jax_q4k.models.engine.loop import EngineLoop
from jax_q4k.models.engine.request import Request
from jax_q4k.models.engine.text import GeneratedText
from jax_q4k.models.network.decoder import Decoder
from jax_q4k.models.runner.speculative.drafts import PromptLookup
from jax_q4k.models.sampling import Constraint, Sampling
from jax_q4k.models.sampling.stages import SamplingArrays
from jax_q4k.models.support.buckets import bucket, fine_bucket

from ..golden_files import NAMES, model, reference

pytestmark = pytest.mark.cpu_kernels

SPM = json.loads((GOLDEN / "text-spm.json").read_text())
PROMPT = SPM["prompt_text"]


@pytest.fixture
def compilations():
    """Counts programs that are compiled during the test."""
    count = [0]

    def listen(event, _, **__):
        count[0] += event == "/jax/core/compile/backend_compile_duration"

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield count
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.slow("compiles a program a model", quick=["llama3-rope", "gemma3", "qwen2-odd"])
@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_are_llama_cpps(name):
    want = reference(name)
    out = models.generate(model(name), want.prompt, max_new_tokens=24)
    assert out.tokens == want.greedy.tolist()
    assert out.text is None and out.finish_reason == "length"


@pytest.mark.slow("compiles a program a model", quick=["llama-gqa"])
@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("name", NAMES)
def test_a_batch_of_prompts_of_different_lengths(name):
    """The prompt alone, the prompt with 10 of its greedy tokens, and a shortened prompt."""
    want = reference(name)
    prompts = [want.prompt, want.tokens[:58], want.prompt[:41]]
    full, longer, shorter = models.generate(model(name), prompts, max_new_tokens=24)
    assert full.tokens == want.greedy.tolist()
    assert longer.tokens[:14] == want.greedy[10:].tolist()
    assert longer.tokens == models.generate(model(name), prompts[1], max_new_tokens=24).tokens
    assert shorter.tokens == models.generate(model(name), prompts[2], max_new_tokens=24).tokens


def test_a_batch_whose_prompts_pad_to_different_buckets():
    want = reference("llama-gqa")
    prompts = [want.prompt[:5].tolist(), want.prompt.tolist(), want.prompt[:17].tolist()]
    together = models.generate(model("llama-gqa"), prompts, max_new_tokens=24)
    for prompt, out in zip(prompts, together, strict=True):
        assert out.tokens == models.generate(model("llama-gqa"), prompt, max_new_tokens=24).tokens


@pytest.mark.usefixtures("exact")
def test_text():
    assert model("text-spm").tokenizer.encode(PROMPT) == SPM["prompt"]
    out = models.generate(model("text-spm"), PROMPT, max_new_tokens=32)
    assert out.tokens == SPM["greedy_f32"]
    assert out.text == model("text-spm").tokenizer.decode(out.tokens, strip_prefix=False)
    assert out.timings.prompt_tokens == len(SPM["prompt"]) and out.timings.new_tokens == 32
    assert out.timings.first_token > 0 and out.timings.decoded_tokens == 31
    assert out.timings.tokens_per_second == 31 / out.timings.decode


@pytest.mark.usefixtures("exact")
def test_prompt_and_text_together_are_the_whole_text():
    prompt = PROMPT + ';">'
    assert models.generate(model("text-spm"), prompt, max_new_tokens=2).text == " state state"
    *_, last = pieces = list(
        models.stream(model("text-spm"), prompt, max_new_tokens=2, stop="statement")
    )
    assert [piece.text for piece in pieces] == [
        " ",
        "state state",
        "",
    ] and last.output.text == " state state"


def test_bytes_that_are_no_character_yet_come_with_the_end():
    row = GeneratedText(model("text-spm").tokenizer, models.Sampling(), ())
    row.push(3 + 0xE2)  # <0xE2>
    assert row.text == ""
    row.finish("length")
    assert row.text == "\N{REPLACEMENT CHARACTER}"


@pytest.mark.usefixtures("exact")
def test_stream_gives_what_generate_gives():
    pieces = list(models.stream(model("text-spm"), PROMPT, max_new_tokens=32))
    *steps, last = pieces
    assert [piece.token for piece in steps] == SPM["greedy_f32"]
    assert all(piece.output is None for piece in steps)
    assert last.output.tokens == SPM["greedy_f32"] and last.output.finish_reason == "length"
    assert "".join(piece.text for piece in pieces) == last.output.text
    assert sum(bool(piece.text) for piece in steps) >= 30  # streamed, not held back to the end


@pytest.mark.parametrize(
    ("seconds", "streamed", "steps"),
    [
        (1e-6, True, 64),
        (1e-6, False, 64),
        (0.005, True, 3),
        (0.005, False, 20),
        (0.025, False, 4),
        (0.025, True, 1),
        (10.0, False, 1),
    ],
)
def test_how_many_tokens_a_step_samples(seconds, streamed, steps):
    """Short steps let an interrupt end generation soon."""
    counts = []
    scheduler = types.SimpleNamespace(plan=counts.append)
    loop = EngineLoop(scheduler, types.SimpleNamespace(draft=None), step_seconds=seconds)
    loop.requests = [types.SimpleNamespace(is_streamed=streamed)]
    loop.step()
    assert counts == [steps]


def test_an_interrupt_leaves_the_model_as_it_was(monkeypatch):
    loaded = model("text-spm")
    want = models.generate(loaded, PROMPT, max_new_tokens=40).tokens
    push = Request.push

    def interrupted(request, *args):
        taken = push(request, *args)
        if len(request.text.tokens) > 1:
            raise KeyboardInterrupt
        return taken

    with monkeypatch.context() as patched:
        patched.setattr(Request, "push", interrupted)
        with pytest.raises(KeyboardInterrupt):
            models.generate(loaded, PROMPT, max_new_tokens=40)
    assert models.generate(loaded, PROMPT, max_new_tokens=40).tokens == want


@pytest.mark.slow("compiles more programs than are kept")
def test_programs_used_last_stay(monkeypatch, compilations):
    """Other programs are recompiled, and their executables are freed."""
    monkeypatch.setattr(sys.modules[models.Model.__module__], "MOST_PROGRAMS", 4)
    loaded = models.from_gguf(GOLDEN / "llama-gqa.Q4_K_M.gguf")

    def run(rows):
        compilations[0] = 0
        models.generate(loaded, [[1, 2]] * rows, max_new_tokens=3)
        return compilations[0]

    client = jax.devices()[0].client
    assert run(1) and run(2) and not run(1)
    gc.collect()
    before = len(client.live_executables())
    assert run(3) and not run(1) and run(2)
    for rows in range(4, 8):
        assert run(rows)
    gc.collect()
    assert len(client.live_executables()) <= before and len(loaded.ready) == 4


def test_batches_are_padded_to_few_sizes():
    sizes = [model("llama-gqa").padded_batch(rows) for rows in range(1, 257)]
    assert sizes[:9] == [1, 2, 3, 4, 5, 6, 7, 8, 10] and len(set(sizes)) == 28
    assert all(rows <= size <= 1.25 * rows for rows, size in enumerate(sizes, 1))


def test_tokens_of_one_call_have_their_own_text(monkeypatch):
    """Each piece has the text that its token completed, however many tokens a call computes."""
    texts = []
    for steps in (1, 16):
        monkeypatch.setattr(EngineLoop, "_steps", lambda _, steps=steps: steps)
        texts.append(
            [piece.text for piece in models.stream(model("text-spm"), PROMPT, max_new_tokens=32)]
        )
    assert texts[0] == texts[1]


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("call", ["generate", "stream"])
def test_stop_strings(call):
    text = models.generate(model("text-spm"), PROMPT, max_new_tokens=32).text
    stop = text[30:33]  # within a token and across tokens
    end = text.index(stop)
    if call == "generate":
        out = models.generate(model("text-spm"), PROMPT, max_new_tokens=32, stop=[stop, "never"])
    else:
        *_, last = pieces = list(
            models.stream(model("text-spm"), PROMPT, max_new_tokens=32, stop=stop)
        )
        out = last.output
        assert "".join(piece.text for piece in pieces) == out.text
    assert out.text == text[:end] and out.finish_reason == "stop"
    assert out.tokens == SPM["greedy_f32"][: len(out.tokens)] and len(out.tokens) < 32
    assert stop in model("text-spm").tokenizer.decode(out.tokens)


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize(("stop", "count"), [("</s>", 1), (["</s></s>", "never"], 2)])
def test_a_stop_string_is_a_control_token(stop, count):
    """Control tokens have no text; their spelling in ordinary tokens matches too."""
    tokenizer = model("text-spm").tokenizer
    options = dict(max_new_tokens=5, logit_bias={2: 1e4}, ignore_end=True, stop=stop)
    out = models.generate(model("text-spm"), PROMPT, **options)
    assert (out.tokens, out.text, out.finish_reason) == ([2] * count, "", "stop")
    *_, last = models.stream(model("text-spm"), PROMPT, **options)
    assert (last.output.tokens, last.output.text) == (out.tokens, "")
    row = GeneratedText(tokenizer, Sampling(stop="</s>\n"), ())
    for token in (*tokenizer.encode("one", add_special=False), 2, 13, 2):
        row.push(token)
    assert (row.text, row.finish_reason, row.tokens[-2:]) == (" one", "stop", [2, 13])


def test_control_tokens_that_are_spelled():
    """Their names are part of the text, those of others are not; stop strings match them."""
    tokenizer = model("text-spm").tokenizer
    words = tokenizer.encode("one", add_special=False)
    for stop, text, reason in ((None, "</s> one</s>\n</s>", None), ("</s>\n", "</s> one", "stop")):
        row = GeneratedText(tokenizer, Sampling(spelled_tokens="</s>", stop=stop), ())
        for token in (1, 2, *words, 2, 13, 2):
            row.push(token)
        assert (row.text, row.finish_reason) == (text, reason)


@pytest.mark.slow("compiles several programs")
def test_prompts_have_no_end_token():
    """Files of embedding models request an end token."""
    given = model("text-spm")
    metadata = given.metadata | {"tokenizer.ggml.add_eos_token": True}
    ending = models.Model(given.parts(), models.tokenizer.from_metadata(metadata), metadata)
    assert ending.tokenizer.encode(PROMPT) == [*SPM["prompt"], 2]
    want = models.generate(given, PROMPT, max_new_tokens=4)
    assert models.generate(ending, PROMPT, max_new_tokens=4).tokens == want.tokens
    *_, last = models.stream(ending, PROMPT, max_new_tokens=4)
    assert last.output.tokens == want.tokens
    text = "The sea was calm that day, and " * 8
    for windows in ("whole", "llama.cpp"):
        scores = [models.score(one, text, context=16, windows=windows) for one in (given, ending)]
        assert scores[0] == scores[1]
    np.testing.assert_array_equal(
        models.embed(ending, PROMPT), models.embed(given, [*SPM["prompt"], 2])
    )


def test_one_row_stops_and_the_others_go_on():
    other = "The sea"
    alone = [
        models.generate(model("text-spm"), prompt, max_new_tokens=24) for prompt in (PROMPT, other)
    ]
    stop = alone[0].text[20:30]
    assert stop not in alone[1].text
    first, second = models.generate(
        model("text-spm"), [PROMPT, other], max_new_tokens=24, stop=stop
    )
    assert (
        first.finish_reason == "stop" and first.text == alone[0].text[: alone[0].text.index(stop)]
    )
    assert second.finish_reason == "length" and second.tokens == alone[1].tokens
    assert second.timings.decoded_tokens < 2 * 23  # the first row had stopped


@pytest.fixture
def ends_early(monkeypatch):
    """text-spm with an end token that it generates: the sixth greedy token."""
    loaded = model("text-spm")
    monkeypatch.setattr(type(loaded.tokenizer), "eos_token_ids", (2, SPM["greedy_f32"][5]))
    return loaded


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("stop", [(), "never"])
def test_end_token(ends_early, stop):
    out = models.generate(ends_early, PROMPT, max_new_tokens=32, stop=stop)
    assert out.tokens == SPM["greedy_f32"][:5] and out.finish_reason == "end"
    assert out.text == ends_early.tokenizer.decode(out.tokens, strip_prefix=False)
    assert out.timings.decoded_tokens == 5  # the end token was decoded too
    *_, last = models.stream(ends_early, PROMPT, max_new_tokens=32, stop=stop)
    assert last.output.tokens == out.tokens and last.output.text == out.text
    ignored = models.generate(ends_early, PROMPT, max_new_tokens=32, ignore_end=True)
    assert ignored.tokens == SPM["greedy_f32"] and ignored.finish_reason == "length"


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("draft", [None, "lookup"])
def test_tokens_that_end_a_text(draft):
    """The text ends before the first of `stop_token_ids`, but not before its minimum."""
    want, loaded = SPM["greedy_f32"], model("text-spm")
    options = dict(max_new_tokens=32, ignore_end=True, draft=draft)
    out = models.generate(loaded, PROMPT, stop_token_ids=[want[9]], **options)
    assert out.tokens == want[: want.index(want[9])] and out.finish_reason == "end"
    least = want.index(want[9]) + 4
    options |= dict(stop_token_ids=[want[9]], min_new_tokens=least)
    out = models.generate(loaded, PROMPT, **options)
    assert want[9] not in out.tokens and len(out.tokens) >= least
    *_, last = models.stream(loaded, PROMPT, **options)
    assert last.output.tokens == out.tokens


@pytest.mark.usefixtures("exact")
def test_stop_strings_wait_for_the_minimum():
    loaded, options = model("text-spm"), dict(max_new_tokens=32, ignore_end=True)
    text = models.generate(loaded, PROMPT, **options).text
    early = models.generate(loaded, PROMPT, stop="e", **options)
    assert early.text == text[: text.index("e")]
    late = models.generate(loaded, PROMPT, stop="e", min_new_tokens=12, **options)
    assert late.finish_reason == "stop" and len(late.tokens) > 12
    assert text.startswith(late.text) and text[len(late.text)] == "e" and "e" in late.text


@pytest.mark.usefixtures("exact")
def test_the_first_token_ends(ends_early):
    prompt = SPM["prompt"] + SPM["greedy_f32"][:5]
    out = models.generate(ends_early, prompt, max_new_tokens=8)
    assert out.tokens == [] and out.text == "" and out.finish_reason == "end"
    (piece,) = models.stream(ends_early, prompt, max_new_tokens=8)
    assert piece.token is None and piece.output.tokens == []


@pytest.mark.usefixtures("exact")
def test_one_new_token():
    out = models.generate(model("text-spm"), PROMPT, max_new_tokens=1)
    assert out.tokens == SPM["greedy_f32"][:1] and np.isnan(out.timings.tokens_per_second)


def test_seeds_and_temperature():
    def tokens(**options):
        return models.generate(model("text-spm"), PROMPT, max_new_tokens=16, **options).tokens

    hot = tokens(temperature=100, seed=1)
    assert len(set(hot)) >= 12  # nearly uniform over 32,000 tokens, each drawn independently
    assert hot == tokens(temperature=100, seed=1)
    assert hot != tokens(temperature=100, seed=2)
    *_, last = models.stream(model("text-spm"), PROMPT, max_new_tokens=16, temperature=100, seed=1)
    assert last.output.tokens == hot


@pytest.mark.parametrize("call", [models.generate, models.stream])
def test_sampling_options_reach_the_programs(call, monkeypatch):
    def of(cls, samplings, end_ids, stages, breaks):
        seen.extend(samplings)
        raise InterruptedError

    seen = []
    monkeypatch.setattr(SamplingArrays, "of", classmethod(of))
    options = dict(temperature=0.5, top_k=3, top_p=0.75, min_p=0.25, repetition_penalty=1.5, seed=7)
    options |= dict(presence_penalty=0.5, frequency_penalty=-0.5, logit_bias={3: 1.5})
    options |= dict(dry_multiplier=0.5, dry_base=1.5, dry_allowed_length=3, dry_penalty_last_n=9)
    options |= dict(dry_sequence_breakers=("y",), processors=(without_sevens,), logprobs=3)
    options |= dict(max_new_tokens=5, stop=("x",), ignore_end=True, penalize_new_only=True)
    options |= dict(stop_token_ids=(9,), min_new_tokens=2, constraint=Constraint.regex("a+"))
    options |= dict(spelled_tokens=("<s>",), prompt_logprobs=2)
    assert {*options} == {field.name for field in dataclasses.fields(Sampling)}
    with pytest.raises(InterruptedError):
        list(call(model("text-spm"), [1], **options))
    assert seen == [Sampling(**options)]


def without_sevens(logits, tokens, length):
    """Excludes token 7 and the second-to-last token."""
    return logits.at[jnp.array([7, tokens[length - 2]])].set(-jnp.inf)


WAYS = {
    "greedy": {},
    "drawn": {"temperature": 1.0},
    "top_k": {"temperature": 0.7, "top_k": 5},
    "top_p": {"temperature": 1.5, "top_p": 0.9, "min_p": 0.01},
    "penalized": {"temperature": 0.9, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    "biased": {"logit_bias": {7: 4.0, 9: -math.inf}},
    "dry": {"dry_multiplier": 2.0, "dry_allowed_length": 1, "dry_sequence_breakers": ()},
    "processed": {"temperature": 1.0, "processors": (without_sevens,)},
}


@pytest.mark.slow("compiles a program for each row")
@pytest.mark.parametrize("draft", [None, PromptLookup(tokens=3, shortest=1)])
@pytest.mark.usefixtures("exact")
def test_a_row_is_what_it_is_alone(draft):
    """Rows with different prompts, lengths, sampling parameters and seeds in one batch."""
    loaded, prompt = model("llama-gqa"), reference("llama-gqa").prompt.tolist()
    samplings = [
        Sampling(max_new_tokens=5 + 3 * i, seed=10 * i, **fields)
        for i, fields in enumerate(WAYS.values())
    ]
    prompts = [prompt[i : 12 + 3 * i] for i in range(len(samplings))]
    together = models.generate(loaded, prompts, samplings, draft=draft)
    for ids, sampling, out in zip(prompts, samplings, together, strict=True):
        alone = models.generate(loaded, ids, sampling)
        assert out.tokens == alone.tokens and len(out.tokens) == sampling.max_new_tokens, sampling
        assert out.finish_reason == alone.finish_reason == "length"


@pytest.mark.slow("compiles programs with and without drafts")
@pytest.mark.parametrize("draft", [None, PromptLookup(tokens=3, shortest=1)])
@pytest.mark.usefixtures("exact")
def test_logprobs(draft):
    """Log-probabilities come from the model's unmodified logits, for any sampling parameters."""
    loaded, prompt = model("llama-gqa"), reference("llama-gqa").prompt.tolist()
    samplings = [
        Sampling(max_new_tokens=9, logprobs=5),
        Sampling(max_new_tokens=12, temperature=1.5, logit_bias={3: 5.0}, logprobs=0),
        Sampling(max_new_tokens=3),
    ]
    outs = models.generate(loaded, [prompt[:20], prompt[:11], prompt], samplings, draft=draft)
    assert outs[2].logprobs is None
    for ids, sampling, out in zip((prompt[:20], prompt[:11]), samplings[:2], outs[:2], strict=True):
        logits = np.asarray(loaded.logits([ids + out.tokens])[0], np.float64)[len(ids) - 1 : -1]
        want = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        assert len(out.logprobs) == len(out.tokens) == sampling.max_new_tokens
        for token, row, got in zip(out.tokens, want, out.logprobs, strict=True):
            assert got.logprob == pytest.approx(row[token], abs=1e-4)
            order = np.argsort(-row)[: sampling.logprobs]
            assert [token for token, _ in got.top] == order.tolist()
            np.testing.assert_allclose([x for _, x in got.top], row[order], atol=1e-4)
    *pieces, last = models.stream(loaded, prompt[:20], samplings[0])
    assert [piece.logprobs.top[0][0] for piece in pieces] == outs[0].tokens
    assert last.output.logprobs == [piece.logprobs for piece in pieces]


@pytest.mark.usefixtures("exact")
def test_logprobs_of_a_text_that_stops():
    loaded = model("text-spm")
    whole = models.generate(loaded, PROMPT, max_new_tokens=8, logprobs=1)
    stop = models.generate(loaded, PROMPT, max_new_tokens=8, logprobs=1, stop=whole.text[4:8])
    assert stop.finish_reason == "stop" and len(stop.logprobs) == len(stop.tokens) < 8
    assert stop.logprobs == whole.logprobs[: len(stop.tokens)]


@pytest.mark.usefixtures("exact")
def test_a_function_of_logits_gets_the_text():
    """A processor gets the prompt and new tokens; it is traced once per program."""
    loaded, traced = model("llama-gqa"), []

    def next_one(logits, tokens, length):
        """Forces the last token + 1 + the length's parity."""
        traced.append((logits.shape, tokens.dtype))
        wanted = (tokens[length - 1] + 1 + length % 2) % logits.shape[0]
        return jnp.where(jnp.arange(logits.shape[0]) == wanted, 0.0, -jnp.inf)

    out = models.generate(loaded, [5, 6, 7], max_new_tokens=6, processors=next_one)
    assert out.tokens == [9, 10, 12, 13, 15, 16]
    assert {shape for shape, _ in traced} == {(loaded.config.vocab_size,)}
    assert {dtype for _, dtype in traced} == {jnp.dtype("int32")}
    count = len(traced)
    models.generate(loaded, [8, 9], max_new_tokens=6, processors=[next_one])
    assert len(traced) == count

    def shortened(logits, tokens, length):
        return logits[1:]

    with pytest.raises(
        ValueError, match=r"shortened returned shape \(511,\); logits have \(512,\)"
    ):
        models.generate(loaded, [1], processors=[shortened])


@pytest.mark.slow("compiles several programs")
@pytest.mark.usefixtures("exact")
def test_rows_with_equal_parameters_draw_by_their_own_seeds():
    loaded, fields = model("llama-gqa"), {"max_new_tokens": 12, "temperature": 1.2}
    together = models.generate(loaded, [[1, 2, 3]] * 3, seed=2**32 - 2, **fields)
    assert len({tuple(out.tokens) for out in together}) == 3
    for seed, out in zip((2**32 - 2, 2**32 - 1, 0), together, strict=True):
        assert models.generate(loaded, [1, 2, 3], seed=seed, **fields).tokens == out.tokens


def test_sampling_parameters_that_do_not_fit():
    loaded = model("llama-gqa")
    with pytest.raises(ValueError, match="sampling has 1 items for 2 prompts"):
        models.generate(loaded, [[1], [2]], [Sampling()])
    with pytest.raises(TypeError, match="sampling is of type int"):
        models.generate(loaded, [[1]], [3])
    with pytest.raises(ValueError, match="logit_bias names token 99999; ids must be 0 to"):
        models.generate(loaded, [1], logit_bias={3: 1, 99999: 1})
    long = Sampling(max_new_tokens=loaded.config.context_length - 2)
    with pytest.raises(ValueError, match=r"a prompt of 3 tokens and max_new_tokens=\d+ exceed"):
        models.generate(loaded, [[1, 2], [1, 2, 3]], [long, long])


def test_arguments_of_other_types():
    """Raises before any work, with the name of the argument."""
    loaded = model("llama-gqa")
    for call in models.generate, models.stream:
        for name, kind in ("prefix", "Prefix"), ("shift", "ContextShift"):
            for given in ("x", 5, False, object):
                found = f"{name} is of type {type(given).__name__}; it must be a {kind} or None"
                with pytest.raises(TypeError, match=found):
                    call(loaded, [1], **{name: given})


@pytest.mark.slow("compiles several programs")
def test_parameters_do_not_recompile(compilations):
    """Random parameters of random stages: each set of stages is compiled once."""
    loaded, rng = models.from_gguf(GOLDEN / "llama-gqa.Q4_K_M.gguf"), random.Random(1)

    def fields():
        return {
            "temperature": rng.uniform(0.1, 2),
            "top_k": rng.randint(1, 64),
            "top_p": rng.uniform(0.1, 1),
            "min_p": rng.uniform(0, 0.3),
            "repetition_penalty": rng.uniform(1.01, 2),
            "presence_penalty": rng.uniform(-1, 1),
            "frequency_penalty": rng.uniform(-1, 1),
            "logit_bias": {
                rng.randrange(256): rng.uniform(-5, 5) for _ in range(rng.randint(1, 8))
            },
            "dry_multiplier": rng.uniform(0.1, 2),
            "dry_base": rng.uniform(1, 2),
            "dry_allowed_length": rng.randint(1, 4),
            "dry_sequence_breakers": (),
            "logprobs": rng.randint(1, 8),
            "seed": rng.randrange(2**32),
            "max_new_tokens": rng.randint(1, 16),
        }

    models.generate(loaded, [1, 2, 3], **fields())
    compilations[0] = 0
    for _ in range(40):
        models.generate(loaded, [1, 2, 3], **fields())
    assert compilations[0] == 0


@pytest.mark.slow("compiles programs for all stages of sampling")
def test_stages_that_come_and_go_do_not_recompile(compilations):
    """After the first few stage sets, shared programs serve all others with unchanged tokens."""
    loaded, rng = models.from_gguf(GOLDEN / "llama-gqa.Q4_K_M.gguf"), random.Random(2)

    def fields(chance):
        adjusting = {
            "repetition_penalty": rng.uniform(1.01, 2),
            "presence_penalty": rng.uniform(-1, 1),
            "logit_bias": {rng.randrange(256): 3.0 for _ in range(rng.randint(1, 8))},
            "dry_multiplier": rng.uniform(0.1, 2),
            "min_p": rng.uniform(0, 0.3),
            "logprobs": rng.randint(1, 8),
        }
        given = {name: value for name, value in adjusting.items() if rng.random() < chance}
        order = rng.choice([{}, {"top_k": 9}, {"top_p": 0.8}, {"top_k": 40, "top_p": 0.9}])
        drawn = {"temperature": rng.uniform(0.1, 2), **order}
        given |= {"dry_sequence_breakers": (), "seed": rng.randrange(2**32)}
        return given | rng.choice([drawn, drawn, {}]) | {"max_new_tokens": 6}

    def tokens(model, given):
        return models.generate(model, [1, 2, 3], **given).tokens

    for _ in range(8):
        tokens(loaded, fields(0.5))
    for order in ({}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 9}):
        tokens(loaded, fields(1.0) | {"temperature": 0.0, "top_k": 0, "top_p": 1.0} | order)
    tokens(loaded, fields(1.0) | {"temperature": 1.0, "top_k": 0, "top_p": 0.5})
    tokens(loaded, {"max_new_tokens": 6})  # greedy
    compilations[0] = 0
    given = [fields(0.5) for _ in range(30)]
    found = [tokens(loaded, each) for each in given]
    assert compilations[0] == 0
    for each, one in list(zip(given, found, strict=True))[::5]:
        alone = models.from_gguf(GOLDEN / "llama-gqa.Q4_K_M.gguf")
        assert tokens(alone, each) == one, each


def test_a_sampling_object_and_fields_in_its_place():
    sampling = Sampling(max_new_tokens=3, temperature=1.0, seed=4)
    want = models.generate(model("llama-gqa"), [5, 6], max_new_tokens=3, temperature=1.0, seed=4)
    assert models.generate(model("llama-gqa"), [5, 6], sampling).tokens == want.tokens
    shorter = models.generate(model("llama-gqa"), [5, 6], sampling, max_new_tokens=2)
    assert shorter.tokens == want.tokens[:2]
    *_, last = models.stream(model("llama-gqa"), [5, 6], sampling)
    assert last.output.tokens == want.tokens
    with pytest.raises(TypeError, match="sampling is of type dict; it must be a Sampling"):
        models.generate(model("llama-gqa"), [5, 6], {"top_k": 3})
    with pytest.raises(TypeError, match="top_n"):
        models.generate(model("llama-gqa"), [5, 6], top_n=3)


def test_repetition_penalty_counts_the_prompt_and_the_new_tokens():
    want = reference("qwen2-bias")
    out = models.generate(
        model("qwen2-bias"), want.prompt, max_new_tokens=24, repetition_penalty=100.0
    )
    assert len(set(out.tokens)) == 24 and not set(out.tokens) & set(want.prompt.tolist())


def test_lengths_do_not_recompile(compilations):
    loaded = models.from_gguf(GOLDEN / "llama-gqa.Q4_K_M.gguf")
    prompt = reference("llama-gqa").prompt
    first = models.generate(loaded, prompt[:9], max_new_tokens=20)
    assert compilations[0] >= 2 and first.timings.compile > 0
    compilations[0] = 0
    for length, new in [(10, 1), (16, 48), (12, 19)]:
        out = models.generate(loaded, prompt[:length], max_new_tokens=new, seed=length)
        assert len(out.tokens) == new and out.timings.compile == 0
    list(models.stream(loaded, prompt[:11], max_new_tokens=18))
    assert compilations[0] == 0
    narrow = models.generate(loaded, prompt[:9], max_new_tokens=1, cache_dtype=jnp.bfloat16)
    assert compilations[0] > 0 and narrow.timings.compile > 0


def test_implementation_choice_is_part_of_the_programs_key():
    # its third token depends on how activations round
    prompt = reference("llama-gqa").prompt[:15]
    with jq.implementation(activations="q8_1"):
        quantized = models.generate(model("llama-gqa"), prompt, max_new_tokens=24).tokens
    with jq.implementation(activations="f32"):
        plain = models.generate(model("llama-gqa"), prompt, max_new_tokens=24).tokens
    assert plain != quantized
    with jq.implementation(activations="q8_1"):
        pieces = models.stream(model("llama-gqa"), prompt, max_new_tokens=24)
    *_, last = pieces  # read outside the block
    assert last.output.tokens == quantized


@pytest.mark.parametrize(
    "size, expected", [(1, 8), (8, 8), (9, 16), (64, 64), (65, 128), (1000, 1024)]
)
def test_buckets(size, expected):
    assert bucket(size) == expected


@pytest.mark.parametrize(
    "size, expected", [(1, 8), (9, 16), (64, 64), (65, 80), (81, 96), (128, 128), (600, 640)]
)
def test_fine_buckets(size, expected):
    assert fine_bucket(size) == expected


def test_prompts_are_padded_to_a_power_of_two_on_a_gpu(monkeypatch):
    assert model("llama-gqa").padded_length(600) == 640
    monkeypatch.setattr(models.Model, "_on_gpu", lambda _: True)
    assert model("llama-gqa").padded_length(600) == 1024


@pytest.mark.slow("compiles for each choice")
def test_fusions_are_chosen_around_the_call(monkeypatch):
    seen = []
    original = Decoder.decode_vectors
    monkeypatch.setattr(
        Decoder, "decode_vectors", lambda *args: seen.append(current_selection()) or original(*args)
    )
    with jq.implementation("xla", activations="q8_1", fused=["mlp"]):
        models.generate(model("llama-gqa"), [1, 2, 3], max_new_tokens=3, cache_dtype=jnp.bfloat16)
    assert seen and set(seen) == {Selection("xla", "q8_1", frozenset(["mlp"]))}


@pytest.mark.parametrize(
    ("name", "prompt", "options", "error", "message"),
    [
        ("llama-gqa", "text", {}, ValueError, "prompt is a text, but the model has no tokenizer"),
        ("llama-gqa", ["a", "b"], {}, ValueError, r"prompts\[0\] is a text"),
        ("llama-gqa", [], {}, ValueError, "prompts is empty"),
        ("text-spm", "a", {"max_new_tokens": 0}, ValueError, "max_new_tokens=0 must be at least 1"),
        ("llama-gqa", [[1], []], {}, ValueError, r"prompts\[1\] has shape \(0,\)"),
        ("llama-gqa", np.zeros((0,), np.int32), {}, ValueError, "prompts is empty"),
        ("llama-gqa", [1, 512], {}, ValueError, "prompt holds token id 512; ids must be 0 to 511"),
        ("llama-gqa", [1, -1], {}, ValueError, "prompt holds token id -1"),
        ("llama-gqa", [1.5, 2.0], {}, TypeError, "prompt has dtype float64"),
        (
            "llama-gqa",
            [1] * 2000,
            {"max_new_tokens": 49},
            ValueError,
            "2000 tokens and max_new_tokens=49.*2048",
        ),
        ("llama-gqa", [1], {"stop": "x"}, ValueError, r"stop=\('x',\) needs a tokenizer"),
        ("llama-gqa", [1], {"temperature": float("nan")}, ValueError, "temperature=nan"),
        ("llama-gqa", [1], {"top_k": -1}, ValueError, "top_k=-1"),
        (
            "llama-gqa",
            [1],
            {"max_new_tokens": 1.5},
            TypeError,
            "max_new_tokens=1.5 must be an integer",
        ),
        (
            "llama-gqa",
            None,
            {},
            TypeError,
            "prompts is of type NoneType; it must be a text, ids, or a list",
        ),
        ("llama-gqa", {"a": 1}, {}, TypeError, "prompts is of type dict"),
        ("llama-gqa", [2**70], {}, TypeError, "prompt has dtype object; it must hold integers"),
        ("text-spm", b"a", {}, TypeError, "prompts is bytes; decode them to text"),
        ("text-spm", bytearray(b"a"), {}, TypeError, "prompts is bytes"),
        ("text-spm", np.array(3), {}, TypeError, "prompts is of type ndarray"),
        ("text-spm", [{"role": "user"}], {}, TypeError, "prompts holds messages; pass models.chat"),
        ("text-spm", "a", {"cache_dtype": None}, TypeError, "cache_dtype=None must be one of"),
        ("text-spm", "a", {"cache_dtype": "foo"}, TypeError, "cache_dtype='foo' must be one of"),
        ("text-spm", "a\udcff", {}, ValueError, "lone surrogate at position 1"),
        ("text-spm", "a", {"max_new_tokens": 10**30}, ValueError, "exceed the context"),
        ("llama-gqa", [1], {"cache_dtype": np.int16}, TypeError, "int16"),
    ],
)
def test_arguments_that_do_not_fit(name, prompt, options, error, message, compilations):
    loaded = model(name)
    compilations[0] = 0
    with pytest.raises(error, match=message):
        models.generate(loaded, prompt, **options)
    with pytest.raises(error, match=message):
        models.stream(loaded, prompt, **options)
    assert compilations[0] == 0


def test_texts_far_beyond_the_context_are_not_encoded(monkeypatch):
    loaded = model("text-spm")
    monkeypatch.setattr(type(loaded.tokenizer), "encode", lambda *_, **__: pytest.fail("encoded"))
    long, message = "x" * 10_000_000, "has 10000000 characters, far too many for the context length"
    for call in (models.generate, models.stream, models.embed):
        with pytest.raises(ValueError, match=message):
            call(loaded, long)
    with pytest.raises(ValueError, match=rf"prompts\[0\] {message}"):
        models.generate(loaded, [long, "x"])


def test_an_empty_text_is_its_first_token():
    loaded = model("text-spm")
    want = models.generate(loaded, loaded.tokenizer.encode(""), max_new_tokens=3).tokens
    assert models.generate(loaded, "", max_new_tokens=3, stop=None).tokens == want
    assert models.generate(loaded, [""], max_new_tokens=3)[0].tokens == want
    with pytest.raises(TypeError, match="model is of type str; it must be a Model, such as"):
        models.generate("model.gguf", "a")


def test_a_prompt_and_new_tokens_may_fill_the_context():
    models.stream(model("llama-gqa"), [1] * 2000, max_new_tokens=48)  # checked, not run


def test_stream_takes_one_prompt():
    with pytest.raises(TypeError, match="stream takes one"):
        models.stream(model("llama-gqa"), [[1], [2]])


def test_abstract_programs_lower():
    programs = models.abstract_programs(model("llama-gqa"), batch=2, prompt_length=8, capacity=32)
    assert set(programs) == {"prefill", "decode", "generate"}
    for jitted, arguments in programs.values():
        lowered = jitted.trace(*arguments).lower()
        assert "tensor<512x1x144xui8>" in lowered.as_text()  # packed weights are arguments
