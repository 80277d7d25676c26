"""Ways of sampling as programs take them: which stages there are, and rows' numbers as arrays."""

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

#: As `Way.candidates`: every token, in order.
ALL = -1
#: Most candidates that are picked out instead of sorting all tokens, and fewest.
MOST_CANDIDATES, FEWEST_CANDIDATES = 1024, 64
#: Beyond every vocabulary: ids that fill a row up.
_NO_TOKEN = np.int32(2**31 - 1)


class Way(NamedTuple):
    """The stages of a program that samples, for rows that may each leave some switched off.

    Attributes:
      draws: some row does not take the likeliest token.
      candidates: tokens that are put in order, where rows filter by it; 0: none does.
      checks: all tokens are put in order after all where a row's top-p reaches beyond candidates.
      penalizes: tokens seen before are counted.
      dry: runs of tokens that were there before are looked for.
      biases, ends: slots of a row for tokens with a bias, and for tokens that end it.
      logprobs: likeliest tokens whose probabilities are kept; None: nor are those of tokens taken.
      processors: users' functions of logits, each distinct sequence of them.
    """

    draws: bool = False
    candidates: int = 0
    checks: bool = False
    penalizes: bool = False
    dry: bool = False
    biases: int = 0
    ends: int = 0
    logprobs: int | None = None
    processors: tuple[tuple[Processor, ...], ...] = ()

    @classmethod
    def of(cls, samplings: Sequence[Sampling], end_ids: Sequence[int] = ()) -> Way:
        """One for rows with these; those that do not ignore ends end with `end_ids`."""
        drawn = [sampling for sampling in samplings if not sampling.greedy]
        most = max((len(sampling.biases) for sampling in samplings), default=0)
        candidates, checks = _candidates(drawn)
        logprobs = [sampling.logprobs for sampling in samplings if sampling.logprobs is not None]
        return cls(
            draws=bool(drawn),
            candidates=candidates,
            checks=checks,
            penalizes=any(sampling.penalizes for sampling in samplings),
            dry=any(sampling.dry_multiplier for sampling in samplings),
            biases=bucket(most) if most else 0,
            ends=bucket(len(end_ids)) if end_ids else 0,
            logprobs=(bucket(max(logprobs)) if max(logprobs) else 0) if logprobs else None,
            processors=_chains(samplings),
        )

    def joined(self, other: Way) -> Way:
        """One that serves both, which order tokens alike (`order`)."""
        logprobs = [way.logprobs for way in (self, other) if way.logprobs is not None]
        return Way(
            draws=self.draws,
            candidates=max(self.candidates, other.candidates),
            checks=self.checks,
            penalizes=self.penalizes or other.penalizes,
            dry=self.dry or other.dry,
            biases=max(self.biases, other.biases),
            ends=max(self.ends, other.ends),
            logprobs=max(logprobs, default=None),
        )

    @property
    def order(self) -> tuple[bool, bool, bool, bool]:
        """How tokens are drawn and put in order, which decides on most of the time."""
        return self.draws, self.checks, self.candidates == ALL, self.candidates > 0

    @property
    def is_argmax(self) -> bool:
        """True where a token is the likeliest one by the logits as they are."""
        return self == Way(ends=self.ends)

    @property
    def reads_text(self) -> bool:
        """True where tokens before the next one count by their order."""
        return self.dry or bool(self.processors)


class Ways:
    """The ways of one model's programs: those asked for first, and then few that serve all others.

    A stage more costs a row nothing but time, and compiling takes longer. So where `exact` ways
    have been asked for, those that serve another one are used for it, and one is made of all that
    none serves and that order tokens alike. Likeliest tokens, and users' functions, have ways of
    their own always.
    """

    def __init__(self, exact: int = 4) -> None:
        self._exact = exact
        self._first: dict[Way, None] = {}
        self._wide: dict[tuple[bool, ...], Way] = {}  # by `Way.order`
        self._lock = threading.Lock()

    def serving(self, way: Way) -> Way:
        """`way`, or one that gives its rows the same tokens."""
        if way.is_argmax or way.processors:
            return way
        with self._lock:
            if way in self._first or len(self._first) < self._exact:
                self._first[way] = None
                return way
            for known in (*self._wide.values(), *self._first):
                if known.order == way.order and known.joined(way) == known:
                    return known
            self._wide[way.order] = wide = self._wide.get(way.order, way).joined(way)
            return wide


def _candidates(drawn: Sequence[Sampling]) -> tuple[int, bool]:
    """`Way.candidates` and `Way.checks`."""
    ordered = [sampling for sampling in drawn if sampling.top_k or sampling.top_p < 1]
    most = max((sampling.top_k for sampling in drawn), default=0)
    if not ordered:
        return 0, False
    if most > MOST_CANDIDATES:
        return ALL, False
    if all(sampling.top_k for sampling in drawn):
        return max(bucket(most), FEWEST_CANDIDATES), False
    return MOST_CANDIDATES, True


def _chains(samplings: Sequence[Sampling]) -> tuple[tuple[Processor, ...], ...]:
    return tuple(dict.fromkeys(tuple(s.processors) for s in samplings if s.processors))


@exportable
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Parameters:
    """Rows' ways of sampling, as `Sampling` has them: arrays (batch,).

    Attributes:
      dry_breaks: bool (batch, vocab_size), tokens that no run goes across; (batch, 0) without DRY.
      bias_ids, biases: int32 and float32 (batch, slots); slots that are free name no token.
      chain: int32, a row's index in `Way.processors`; -1: it has none.
      end_ids: int32 (batch, slots), tokens that end a row; -1: none.
      max_new_tokens: with which a row ends.
      first_step: tokens that a row drew before, by other programs.
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
    first_step: jax.Array

    @classmethod
    def of(
        cls,
        samplings: Sequence[Sampling],
        end_ids: Sequence[int] = (),
        way: Way | None = None,
        breaks: Callable[[tuple[str, ...]], np.ndarray] | None = None,
        first_steps: Sequence[int] | None = None,
    ) -> Parameters:
        """NumPy's arrays of rows, for a program of `way`, or of the one that they ask for.

        first_steps: tokens that rows drew before; None: none.
        breaks: strings -> bool (vocab_size,), tokens that hold one of them; needed for DRY.
        """
        way = Way.of(samplings, end_ids) if way is None else way
        batch = len(samplings)

        def each(name: str, dtype: type = np.float32) -> Any:
            return np.array([getattr(sampling, name) for sampling in samplings], dtype)

        ids: Any = np.full((batch, way.biases), _NO_TOKEN, np.int32)
        biases: Any = np.zeros((batch, way.biases), np.float32)
        ends: Any = np.full((batch, way.ends), -1, np.int32)
        for row, sampling in enumerate(samplings):
            for slot, (token, bias) in enumerate(sampling.biases):
                ids[row, slot], biases[row, slot] = token, bias
            if not sampling.ignore_end:
                ends[row, : len(end_ids)] = end_ids
        floats = "top_p", "min_p", "dry_multiplier", "dry_base"
        penalties = "repetition_penalty", "presence_penalty", "frequency_penalty"
        integers = "top_k", "dry_allowed_length", "dry_penalty_last_n", "max_new_tokens"
        order = {chain: i for i, chain in enumerate(way.processors)}
        chains: Any = [order.get(tuple(sampling.processors), -1) for sampling in samplings]
        return cls(
            seed=each("seed", np.uint32),
            # float32 would round what is nearly LEAST_TEMPERATURE up to it.
            temperature=np.array([0 if s.greedy else s.temperature for s in samplings], np.float32),  # type: ignore[arg-type]
            **{name: each(name) for name in (*floats, *penalties)},
            **{name: each(name, np.int32) for name in integers},
            dry_breaks=_breaks(samplings, way, breaks),
            bias_ids=ids,
            biases=biases,
            chain=np.asarray(chains, np.int32),  # type: ignore[arg-type]
            end_ids=ends,
            first_step=np.asarray(first_steps or [0] * batch, np.int32),  # type: ignore[arg-type]
        )

    def repeated(self, count: int) -> Parameters:
        """Each row `count` times, one behind the other."""
        return jax.tree.map(lambda x: jnp.repeat(x, count, axis=0), self)

    def are_ends(self, tokens: jax.Array) -> jax.Array:
        """Whether tokens int32 (batch, ...) end their rows."""
        ends = self.end_ids.reshape(len(self.end_ids), *[1] * (tokens.ndim - 1), -1)
        return (tokens[..., None] == ends).any(axis=-1)


def _breaks(
    samplings: Sequence[Sampling],
    way: Way,
    breaks: Callable[[tuple[str, ...]], np.ndarray] | None,
) -> Any:
    if not way.dry:
        return np.zeros((len(samplings), 0), bool)
    if breaks is None:
        raise ValueError("DRY needs the tokens that break a run: pass breaks")
    given = [tuple(s.dry_sequence_breakers) if s.dry_multiplier else () for s in samplings]
    return np.stack([breaks(texts) for texts in given])
