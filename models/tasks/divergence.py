"""Compares a model's predictions with a base model's: Kullback-Leibler divergence and others."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np

from jax_q4k import current_selection

from ..engine.generate import embeddings
from ..engine.prompt_results import TokenVectors
from ..runner.model import Model
from ..runner.program_cache import CachedPrograms
from ..runner.prompt_programs import CompareTokens
from .perplexity import batches, checked, llama_windows


class Estimate(NamedTuple):
    """A mean over tokens, or a function of means.

    Attributes:
      error: its standard error, assuming independent tokens; 0 for fewer than 11 tokens.
    """

    value: float
    error: float


@dataclasses.dataclass(frozen=True, eq=False)
class Divergence:
    """A model's predictions of a text's tokens beside a base model's, as llama.cpp counts.

    Attributes:
      divergences: float64 (n,), Kullback-Leibler divergence of the model's distribution of each
        token from the base model's, in nats: the sum of p_base * log(p_base / p) over the tokens of
        the vocabulary whose p_base is above e^-16.
      nats, base_nats: float64 (n,), -log p of the text's tokens, by the model and by the base.
      agrees: bool (n,), whether both find the same token the most likely one.
    """

    divergences: np.ndarray
    nats: np.ndarray
    base_nats: np.ndarray
    agrees: np.ndarray

    @property
    def tokens(self) -> int:
        """Number of predicted tokens, n."""
        return len(self.nats)

    @property
    def mean(self) -> Estimate:
        """Mean divergence, in nats."""
        return _mean(self.divergences)

    def percentile(self, percent: float) -> float:
        """Returns a percentile of the divergences: 50 is the median, 100 the maximum."""
        return float(np.percentile(self.divergences, percent))

    @property
    def same_top(self) -> Estimate:
        """Part of the tokens for which both models have the same most likely one, 0 to 1."""
        share = float(self.agrees.mean())
        error = math.sqrt(share * (1 - share) / (self.tokens - 1)) if self.tokens > 1 else 0.0
        return Estimate(share, error)

    @property
    def delta_p(self) -> Estimate:
        """Mean of p - p_base of the text's tokens: below 0 if the model predicts them worse."""
        return _mean(self.delta_ps)

    @property
    def rms_delta_p(self) -> Estimate:
        """Root of the mean square of p - p_base of the text's tokens."""
        square = _mean(self.delta_ps**2)
        root = math.sqrt(square.value)
        return Estimate(root, square.error / (2 * root) if root else 0.0)

    @property
    def delta_ps(self) -> np.ndarray:
        """p - p_base of the text's tokens, float64 (n,)."""
        found: np.ndarray = np.exp(-self.nats) - np.exp(-self.base_nats)
        return found

    @property
    def perplexity(self) -> Estimate:
        """Perplexity of the model."""
        return _exponential(_mean(self.nats))

    @property
    def base_perplexity(self) -> Estimate:
        """Perplexity of the base model."""
        return _exponential(_mean(self.base_nats))

    @property
    def log_ratio(self) -> Estimate:
        """Logarithm of the ratio of the model's perplexity to the base model's."""
        ours, theirs = _mean(self.nats), _mean(self.base_nats)
        variance = ours.error**2 + theirs.error**2 - 2 * self._covariance
        return Estimate(ours.value - theirs.value, math.sqrt(max(variance, 0.0)))

    @property
    def ratio(self) -> Estimate:
        """Ratio of the model's perplexity to the base model's."""
        return _exponential(self.log_ratio)

    @property
    def correlation(self) -> float:
        """Correlation of the logarithms of both perplexities, -1 to 1; NaN if one is constant."""
        errors = _mean(self.nats).error * _mean(self.base_nats).error
        return self._covariance / errors if errors else math.nan

    @property
    def _covariance(self) -> float:
        """Covariance of the means of `nats` and `base_nats`; 0 for fewer than 10 tokens."""
        if self.tokens < 10:
            return 0.0
        means = float(self.nats.mean()) * float(self.base_nats.mean())
        return (float((self.nats * self.base_nats).mean()) - means) / (self.tokens - 1)


def kl_divergence(
    model: Model,
    base: Model,
    text: str,
    *,
    context: int | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> Divergence:
    """Compares the predictions of `model`, such as a quantized one, with those of `base`.

    Both read llama.cpp's windows of the text, and the second half of each is compared, as by its
    `perplexity --kl-divergence`. That stores the base model's log-probabilities in 16 bits, down to
    16 below the largest; here they are float32, which changes the perplexity of an unlikely text.

    Args:
      context: tokens per window, BOS included; None means the model's context length, at most 512.
      progress: called with (windows done, number of windows).

    Raises:
      ValueError: as `score` does; models with different vocabularies, or on several devices.
        TypeError: the context is not an integer.
    """
    tokenizer, length = checked(model, context)
    if length > base.config.context_length:
        raise ValueError(f"context={length} exceeds the base model's, {base.config.context_length}")
    if model.placement is not None or base.placement is not None:
        raise ValueError("kl_divergence takes models on one device each, without a mesh")
    windows = llama_windows(tokenizer, text, length)
    ours, theirs = model.config.vocab_size, base.config.vocab_size
    if ours != theirs:
        raise ValueError(f"base has a vocabulary of {theirs} tokens, the model one of {ours}")
    if base.tokenizer is not None and llama_windows(base.tokenizer, text, length) != windows:
        raise ValueError("base has another tokenizer than the model: it splits the text otherwise")
    programs = CachedPrograms(model, (model.weights, base.weights), current_selection())
    program = CompareTokens(model.network, base=base.network)
    parts, done, first = [], 0, length // 2
    for rows in batches(windows):
        prompts = [np.array(row, np.int32) for row in rows]
        arguments = *(_vectors(one, prompts, first) for one in (model, base)), _targets(rows, first)
        with programs.context(), jax.transfer_guard_device_to_host("allow"):
            compared = programs.ready(program, *arguments)(programs.weights, *arguments)
            parts.append(jax.tree.map(np.asarray, compared))
        done += len(rows)
        if progress is not None:
            progress(done, len(windows))
    columns = ("divergence", "nats", "base_nats", "agrees")
    arrays = [np.concatenate([getattr(part, name) for part in parts]) for name in columns]
    divergences, nats, base_nats = (x.astype(np.float64) for x in arrays[:3])
    return Divergence(divergences, nats, base_nats, arrays[3])


def _vectors(model: Model, prompts: list[np.ndarray], first: int) -> np.ndarray:
    """Returns the hidden states of the tokens that predict those after position `first`."""
    wanted = [TokenVectors(len(ids), normed=False) for ids in prompts]
    found = embeddings(model, prompts, wanted)
    return np.concatenate([vectors[first:-1] for vectors in found])


def _targets(rows: list[list[int]], first: int) -> np.ndarray:
    return np.concatenate([np.array(row[first + 1 :], np.int32) for row in rows])


def _mean(values: np.ndarray) -> Estimate:
    mean, count = float(values.mean()), len(values)
    variance = float((values**2).mean()) - mean**2
    error = math.sqrt(max(variance, 0.0) / (count - 1)) if count > 10 else 0.0
    return Estimate(mean, error)


def _exponential(estimate: Estimate) -> Estimate:
    """Returns the exponential of an estimate; infinite beyond float64."""
    try:
        value = math.exp(estimate.value)
    except OverflowError:
        return Estimate(math.inf, math.inf)
    return Estimate(value, value * estimate.error)
