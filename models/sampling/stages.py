"""Sampling parameters as a jitted program takes them: static stages, and per-row arrays."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..support.buckets import bucket
from ..support.exportable import exportable
from .params import Processor, Sampling

#: The most log-probabilities per token that servers usually offer.
USUAL_LOGPROBS = 20
#: Padding id, larger than any vocabulary.
_NO_TOKEN = np.int32(2**31 - 1)


class SamplingStages(NamedTuple):
    """Stages that a sampling program contains; each row may leave some of them unused.

    Attributes:
      draws: whether some row samples instead of taking the most likely token.
      penalizes: whether to count earlier tokens, for penalties.
      dry: whether to search for repeated runs of tokens, for DRY.
      minimum: whether first tokens cannot be end tokens, for `min_new_tokens`.
      biases, ends: slots per row for biased tokens and for end tokens.
      logprobs: number of most likely tokens reported per step; None reports no probabilities.
      processors: distinct chains of user functions on logits.
    """

    draws: bool = False
    penalizes: bool = False
    dry: bool = False
    minimum: bool = False
    biases: int = 0
    ends: int = 0
    logprobs: int | None = None
    processors: tuple[tuple[Processor, ...], ...] = ()

    @classmethod
    def of(cls, samplings: Sequence[Sampling], end_ids: Sequence[int] = ()) -> SamplingStages:
        """Returns the stages that requests with these sampling parameters need.

        end_ids: end tokens of the model.
        """
        ends = max((len(sampling.end_ids(end_ids)) for sampling in samplings), default=0)
        count = max((len(sampling.biases) for sampling in samplings), default=0)
        logprobs = [sampling.logprobs for sampling in samplings if sampling.logprobs is not None]
        return cls(
            draws=not all(sampling.greedy for sampling in samplings),
            penalizes=any(sampling.penalizes for sampling in samplings),
            dry=any(sampling.dry_multiplier for sampling in samplings),
            minimum=any(sampling.min_new_tokens for sampling in samplings),
            biases=bucket(count) if count else 0,
            ends=bucket(ends) if ends else 0,
            logprobs=_bucket_of_logprobs(max(logprobs)) if logprobs else None,
            processors=_chains(samplings),
        )

    def joined(self, other: SamplingStages) -> SamplingStages:
        """Returns the union of the stages with `other`."""
        logprobs = [stages.logprobs for stages in (self, other) if stages.logprobs is not None]
        return SamplingStages(
            draws=self.draws or other.draws,
            penalizes=self.penalizes or other.penalizes,
            dry=self.dry or other.dry,
            minimum=self.minimum or other.minimum,
            biases=max(self.biases, other.biases),
            ends=max(self.ends, other.ends),
            logprobs=max(logprobs, default=None),
            processors=tuple(dict.fromkeys(self.processors + other.processors)),
        )

    @property
    def is_argmax(self) -> bool:
        """Whether sampling is an argmax of unchanged logits."""
        return self == SamplingStages(ends=self.ends)

    @property
    def reads_history(self) -> bool:
        """Whether a stage reads the sequence of earlier tokens."""
        return self.dry or bool(self.processors)


class SharedStages:
    """Limits how many programs one model compiles for sampling.

    The first `exact` stage sets get programs of their own. Later ones use a program whose stages
    are a superset: unused stages cost time but change no token. If there is none, one superset is
    made for stages that draw, and one for the others. Argmax and user functions always get exact
    programs.
    """

    def __init__(self, exact: int = 4) -> None:
        self._exact = exact
        self._first: dict[SamplingStages, None] = {}
        self._wide: dict[bool, SamplingStages] = {}  # by `SamplingStages.draws`
        self._lock = threading.Lock()

    def serving(self, stages: SamplingStages) -> SamplingStages:
        """Returns `stages`, or a superset that samples the same tokens."""
        if stages.is_argmax or stages.processors:
            return stages
        with self._lock:
            if stages in self._first or len(self._first) < self._exact:
                self._first[stages] = None
                return stages
            for known in (*self._wide.values(), *self._first):
                if known.draws == stages.draws and known.joined(stages) == known:
                    return known
            self._wide[stages.draws] = wide = self._wide.get(stages.draws, stages).joined(stages)
            return wide


def _bucket_of_logprobs(count: int) -> int:
    """Returns 0, 8, 16, USUAL_LOGPROBS, 32, 64, ..., at least `count`."""
    if not count:
        return 0
    return USUAL_LOGPROBS if 16 < count <= USUAL_LOGPROBS else bucket(count)


def _chains(samplings: Sequence[Sampling]) -> tuple[tuple[Processor, ...], ...]:
    return tuple(dict.fromkeys(tuple(s.processors) for s in samplings if s.processors))


@exportable
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplingArrays:
    """Sampling parameters, one entry per row: the fields of `Sampling` as arrays (batch,).

    Attributes:
      dry_breaks: bool (batch, vocab_size), tokens that end a DRY match; (batch, 0) without DRY.
      bias_ids, biases: int32 and float32 (batch, slots), token ids and numbers added to their
        logits; unused slots have an id beyond the vocabulary.
      chain: int32, index into `SamplingStages.processors`; -1 means no processors.
      end_ids: int32 (batch, slots), tokens that end a row; -1 for unused slots.
      max_new_tokens, min_new_tokens: int32, limits on new tokens.
      first_step: int32, number of tokens that earlier calls sampled.
    """

    seed: jax.Array
    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    repetition_penalty: jax.Array
    presence_penalty: jax.Array
    frequency_penalty: jax.Array
    dry_multiplier: jax.Array
    dry_base: jax.Array
    dry_allowed_length: jax.Array
    dry_penalty_last_n: jax.Array
    dry_breaks: jax.Array
    bias_ids: jax.Array
    biases: jax.Array
    chain: jax.Array
    end_ids: jax.Array
    max_new_tokens: jax.Array
    min_new_tokens: jax.Array
    first_step: jax.Array

    @classmethod
    def of(
        cls,
        samplings: Sequence[Sampling],
        end_ids: Sequence[int] = (),
        stages: SamplingStages | None = None,
        breaks: Callable[[tuple[str, ...]], np.ndarray] | None = None,
    ) -> SamplingArrays:
        """Returns the requests' sampling parameters as NumPy arrays for a program with `stages`.

        stages: None means the stages that the requests need.
        breaks: maps strings to a mask bool (vocab_size,) of tokens that contain one; DRY needs it.
        """
        stages = SamplingStages.of(samplings, end_ids) if stages is None else stages
        batch = len(samplings)

        def each(name: str, dtype: type = np.float32) -> Any:
            return np.array([getattr(sampling, name) for sampling in samplings], dtype)

        ids: Any = np.full((batch, stages.biases), _NO_TOKEN, np.int32)
        biases: Any = np.zeros((batch, stages.biases), np.float32)
        ends: Any = np.full((batch, stages.ends), -1, np.int32)
        for row, sampling in enumerate(samplings):
            for slot, (token, bias) in enumerate(sampling.biases):
                ids[row, slot], biases[row, slot] = token, bias
            ids_of_row = sampling.end_ids(end_ids)
            ends[row, : len(ids_of_row)] = ids_of_row
        floats = "top_p", "min_p", "dry_multiplier", "dry_base"
        penalties = "repetition_penalty", "presence_penalty", "frequency_penalty"
        limits = "max_new_tokens", "min_new_tokens"
        integers = "top_k", "dry_allowed_length", "dry_penalty_last_n", *limits
        order = {chain: i for i, chain in enumerate(stages.processors)}
        chains: Any = [order.get(tuple(sampling.processors), -1) for sampling in samplings]
        return cls(
            seed=each("seed", np.uint32),
            # float32 would round what is nearly LEAST_TEMPERATURE up to it.
            temperature=np.array([0 if s.greedy else s.temperature for s in samplings], np.float32),  # type: ignore[arg-type]
            **{name: each(name) for name in (*floats, *penalties)},
            **{name: each(name, np.int32) for name in integers},
            dry_breaks=_breaks(samplings, stages, breaks),
            bias_ids=ids,
            biases=biases,
            chain=np.asarray(chains, np.int32),  # type: ignore[arg-type]
            end_ids=ends,
            first_step=np.zeros(batch, np.int32),  # type: ignore[arg-type]
        )

    def repeated(self, count: int) -> SamplingArrays:
        """Returns the arrays with each row repeated `count` times."""
        return jax.tree.map(lambda x: jnp.repeat(x, count, axis=0), self)

    def are_ends(self, tokens: jax.Array) -> jax.Array:
        """Returns which of the tokens int32 (batch, ...) are end tokens of their row: bool."""
        ends = self.end_ids.reshape(len(self.end_ids), *[1] * (tokens.ndim - 1), -1)
        return (tokens[..., None] == ends).any(axis=-1)


def _breaks(
    samplings: Sequence[Sampling],
    stages: SamplingStages,
    breaks: Callable[[tuple[str, ...]], np.ndarray] | None,
) -> Any:
    if not stages.dry:
        return np.zeros((len(samplings), 0), bool)
    if breaks is None:
        raise ValueError("DRY needs the tokens that break a run: pass breaks")
    breakers = [tuple(s.dry_sequence_breakers) if s.dry_multiplier else () for s in samplings]
    return np.stack([breaks(texts) for texts in breakers])
