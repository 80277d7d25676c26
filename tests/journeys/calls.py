"""Generation calls as values, and their reference outputs from a new model without a cache."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax_q4k as jq
from jax_q4k import models

from .amount import JOURNEYS
from .files import ADAPTERS, ORIGINAL, path

#: Tolerance between two computations of a log-probability, whose sums run in different orders.
TOLERANCE = 1e-4

SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 0.9},
    "top-k": {"temperature": 0.9, "top_k": 5},
    "top-p": {"temperature": 0.9, "top_p": 0.8},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.2},
    "dry": {"dry_multiplier": 0.8, "dry_sequence_breakers": ()},
    "bias": {"logit_bias": {7: 3.0}},
    "logprobs": {"logprobs": 2},
    "prompt logprobs": {"prompt_logprobs": 2},
}


class Result(NamedTuple):
    """Output of one row, without timings."""

    tokens: tuple[int, ...]
    text: str | None
    finish_reason: str
    logprobs: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of `generate`; equal calls must have equal outputs.

    Attributes:
      model: a name that `files.path` knows; "short" uses a context shift when its context is full.
      prompts: token ids, one tuple per row of the batch.
      new_tokens: tokens for the first row; each further row gets three quarters of the row before,
        or the same number if `even`.
      sampling: key of SAMPLINGS.
      draft: "lookup", "model" (the same file is the draft model), or None.
      lora: (adapter name, scale), or None.
    """

    model: str = ORIGINAL
    prompts: tuple[tuple[int, ...], ...] = ((1, 5, 9),)
    new_tokens: int = 20
    sampling: str = "greedy"
    seed: int = 0
    draft: str | None = None
    lora: tuple[str, float] | None = None
    cache_dtype: str = "float32"
    implementation: Any = "native"
    activations: Any = "f32"
    stop: str | None = None
    ignore_end: bool = True
    even: bool = False

    def __repr__(self) -> str:
        fields = [(f.name, getattr(self, f.name), f.default) for f in dataclasses.fields(self)]
        given = [f"{name}={value!r}" for name, value, default in fields if value != default]
        return f"Call({', '.join(given)})"

    @property
    def samplings(self) -> list[models.Sampling]:
        fields = SAMPLINGS[self.sampling] | {"stop": self.stop, "ignore_end": self.ignore_end}
        counts = [self.new_tokens]
        while len(counts) < len(self.prompts):
            counts.append(counts[-1] if self.even else max(1, counts[-1] * 3 // 4))
        rows = range(self.seed, self.seed + len(counts))
        return [
            models.Sampling(max_new_tokens=count, seed=seed, **fields)
            for count, seed in zip(counts, rows, strict=True)
        ]

    def load(self) -> models.Model:
        lora = None if self.lora is None else (path(self.lora[0]), self.lora[1])
        return models.load(path(self.model), lora=lora)

    def options(self, prefix: models.Prefix | None = None) -> dict[str, Any]:
        """Arguments of `generate` and `stream`."""
        draft = models.load(path(self.model)) if self.draft == "model" else self.draft
        shift = models.ContextShift(keep=2) if self.model == "short" else None
        given = {"cache_dtype": self.cache_dtype, "draft": draft, "shift": shift}
        return given if prefix is None else given | {"prefix": prefix}

    def selected(self) -> Any:
        return jq.implementation(self.implementation, activations=self.activations)

    def run(self, model: models.Model, prefix: models.Prefix | None = None) -> tuple[Result, ...]:
        with self.selected():
            prompts = [list(ids) for ids in self.prompts]
            outputs = models.generate(model, prompts, self.samplings, **self.options(prefix))
        return tuple(self.result(*row) for row in zip(outputs, self.samplings, strict=True))

    def pieces(self, model: models.Model, prefix: models.Prefix | None = None) -> Any:
        """Streams a call with one prompt."""
        (ids,), (sampling,) = self.prompts, self.samplings
        with self.selected():
            return models.stream(model, list(ids), sampling, **self.options(prefix))

    def run_stream(
        self, model: models.Model, prefix: models.Prefix | None = None
    ) -> tuple[Result, ...]:
        pieces = list(self.pieces(model, prefix))
        output = pieces[-1].output
        assert output.tokens == [piece.token for piece in pieces if piece.token is not None]
        assert output.text is None or output.text == "".join(piece.text for piece in pieces)
        return (self.result(output, self.samplings[0]),)

    @staticmethod
    def result(output: models.Output, sampling: models.Sampling) -> Result:
        if output.finish_reason == "length":
            asked = sampling.max_new_tokens
            assert len(output.tokens) == asked, f"{len(output.tokens)} tokens of {asked}"
        logprobs = [*(output.prompt_logprobs or [None])[1:], *(output.logprobs or ())]
        values = [x for one in logprobs for x in (one.logprob, *(p for _, p in one.top))]
        return Result(tuple(output.tokens), output.text, output.finish_reason, tuple(values))


@functools.cache
def alone(call: Call) -> tuple[Result, ...]:
    """Runs a call on a newly loaded model without a program cache."""
    return call.run(call.load())


def difference(got: Sequence[Result], want: Sequence[Result]) -> str | None:
    """Describes how outputs differ, or None if they agree (log-probabilities within TOLERANCE)."""
    if len(got) != len(want):
        return f"{len(got)} rows instead of {len(want)}"
    for row, (one, other) in enumerate(zip(got, want, strict=True)):
        pairs = enumerate(zip(one.tokens, other.tokens, strict=False))
        at = next((i for i, (a, b) in pairs if a != b), None)
        if at is not None:
            return f"row {row}: token {at} is {one.tokens[at]} instead of {other.tokens[at]}"
        if len(one.tokens) != len(other.tokens):
            return f"row {row}: {len(one.tokens)} tokens instead of {len(other.tokens)}"
        if one[:3] != other[:3]:
            return f"row {row}: {one[:3]} instead of {other[:3]}"
        if len(one.logprobs) != len(other.logprobs):
            return f"row {row}: {len(one.logprobs)} log-probabilities, not {len(other.logprobs)}"
        for a, b in zip(one.logprobs, other.logprobs, strict=True):
            if not abs(a - b) <= TOLERANCE:  # also catches NaN
                return f"row {row}: a log-probability of {a} instead of {b}"
    return None


Choose = Callable[[Sequence[Any]], Any]

#: Field -> possible values; repeated values are more likely.
CHOICES: dict[str, tuple[Any, ...]] = {
    "model": (ORIGINAL, ORIGINAL, "short", "gemma3", "qwen35"),
    "new_tokens": (1, 5, 40, 70, 150, 250),
    "sampling": tuple(SAMPLINGS),
    "seed": (0, 1),
    "draft": (None, None, None, "lookup", "model"),
    "lora": (None, None, *[(name, scale) for name in ADAPTERS for scale in (1.0, 0.5)]),
    "cache_dtype": ("float32", "float32", "bfloat16", "int8"),
    "implementation": ("native",) * 7 + ("xla" if JOURNEYS else "native",),  # compiles slowly
    "activations": ("f32", "q8_1"),
}
LENGTHS = (1, 3, 8, 20, 40)


def prompt(choose: Choose) -> tuple[int, ...]:
    """Token ids that are valid for every model."""
    length, first = choose(LENGTHS), choose((3, 50))
    return tuple((first + 13 * i * i) % 200 + 3 for i in range(length))


def changed(call: Call, choose: Choose, fields: Sequence[str] = (*CHOICES, "prompts")) -> Call:
    """Returns a call that differs in one of the given fields."""
    field = choose(fields)
    if field == "prompts":
        prompts = tuple(prompt(choose) for _ in range(choose((1, 1, 1, 2, 3))))
        return dataclasses.replace(call, prompts=prompts)
    found = dataclasses.replace(call, **{field: choose(CHOICES[field])})
    # adapters belong to one file
    return found if found.model == ORIGINAL else dataclasses.replace(found, lora=None)
