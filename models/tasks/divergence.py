"""Compares a model's predictions with a base model's: Kullback-Leibler divergence and others."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from jax_q4k import current_selection

from ..runner.model import Model
from ..runner.program_cache import CachedPrograms
from ..runner.prompt_programs import CompareTokens
from .base_logits import BaseLogits, opened_logits
from .estimates import Estimate, exponential, mean_of
from .perplexity import BATCH, batches, checked, hidden_states, llama_cut, llama_windows, with_start


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
        return mean_of(self.divergences)

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
        return mean_of(self.delta_ps)

    @property
    def rms_delta_p(self) -> Estimate:
        """Root of the mean square of p - p_base of the text's tokens."""
        square = mean_of(self.delta_ps**2)
        root = math.sqrt(square.value)
        return Estimate(root, square.error / (2 * root) if root else 0.0)

    def delta_p_percentile(self, percent: float) -> float:
        """Returns a percentile of p - p_base: 50 is the median, 100 the maximum."""
        return float(np.percentile(self.delta_ps, percent))

    @property
    def delta_ps(self) -> np.ndarray:
        """p - p_base of the text's tokens, float64 (n,)."""
        found: np.ndarray = np.exp(-self.nats) - np.exp(-self.base_nats)
        return found

    @property
    def perplexity(self) -> Estimate:
        """Perplexity of the model."""
        return exponential(mean_of(self.nats))

    @property
    def base_perplexity(self) -> Estimate:
        """Perplexity of the base model."""
        return exponential(mean_of(self.base_nats))

    @property
    def log_ratio(self) -> Estimate:
        """Logarithm of the ratio of the model's perplexity to the base model's."""
        ours, theirs = mean_of(self.nats), mean_of(self.base_nats)
        variance = ours.error**2 + theirs.error**2 - 2 * self._covariance
        return Estimate(ours.value - theirs.value, math.sqrt(max(variance, 0.0)))

    @property
    def ratio(self) -> Estimate:
        """Ratio of the model's perplexity to the base model's."""
        return exponential(self.log_ratio)

    @property
    def difference(self) -> Estimate:
        """Difference of the model's perplexity and the base model's."""
        ours, theirs = self.perplexity, self.base_perplexity
        covariance = ours.value * theirs.value * self._covariance
        variance = ours.error**2 + theirs.error**2 - 2 * covariance
        return Estimate(ours.value - theirs.value, math.sqrt(max(variance, 0.0)))

    @property
    def correlation(self) -> float:
        """Correlation of the logarithms of both perplexities, -1 to 1; NaN if one is constant."""
        errors = mean_of(self.nats).error * mean_of(self.base_nats).error
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
    base: Model | str | os.PathLike[str],
    text: str,
    *,
    context: int | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> Divergence:
    """Compares the predictions of `model`, such as a quantized one, with those of `base`.

    Both read llama.cpp's windows of the text, and the second half of each is compared, as by its
    `perplexity --kl-divergence`. Files have the base model's log-probabilities in 16 bits, down to
    16 below the largest; those of a model are float32, which changes the perplexity of an unlikely
    text.

    Args:
      base: a model, or the path of a file of `save_base_logits` or of llama.cpp's `perplexity
        --kl-divergence-base`, made of the same text.
      context: tokens per window, BOS included; None means that of the file, or for a model the
        model's context length, at most 512.
      progress: called with (windows done, number of windows).

    Raises:
      ValueError: as `score` does; models with different vocabularies, or on several devices; a file
        that is malformed or made of another text. TypeError: the context is not an integer.
        OSError: the file cannot be read.
    """
    if model.placement is not None:
        raise ValueError("kl_divergence takes models on one device each, without a mesh")
    if isinstance(base, Model):
        return _compared(model, _base_model(base, model, text, context), progress)
    with opened_logits(base) as file:
        return _compared(model, _base_file(file, model, text, context), progress)


class _Base(NamedTuple):
    """Predictions of a base model.

    Attributes:
      windows: llama.cpp's windows of the text.
      batch: windows that are compared at a time.
      read: maps the next windows to the argument `base` of CompareTokens.
    """

    windows: list[list[int]]
    batch: int
    read: Callable[[list[list[int]]], Any]
    model: Model | None = None


def _base_model(base: Model, model: Model, text: str, context: int | None) -> _Base:
    """Returns the predictions of a model that is in memory."""
    tokenizer, length = checked(model, context)
    if length > base.config.context_length:
        raise ValueError(f"context={length} exceeds the base model's, {base.config.context_length}")
    if base.placement is not None:
        raise ValueError("kl_divergence takes models on one device each, without a mesh")
    windows = llama_windows(tokenizer, text, length)
    ours, theirs = model.config.vocab_size, base.config.vocab_size
    if ours != theirs:
        raise ValueError(f"base has a vocabulary of {theirs} tokens, the model one of {ours}")
    if base.tokenizer is not None and llama_windows(base.tokenizer, text, length) != windows:
        raise ValueError("base has another tokenizer than the model: it splits the text otherwise")

    def read(rows: list[list[int]]) -> np.ndarray:
        return hidden_states(base, rows, length // 2)

    return _Base(windows, BATCH, read, base)


def _base_file(file: BaseLogits, model: Model, text: str, context: int | None) -> _Base:
    """Returns the predictions in a file."""
    if context not in (None, file.length):
        raise ValueError(f"context={context} differs from the file's windows of {file.length}")
    tokenizer, length = checked(model, file.length)
    if file.vocab_size != model.config.vocab_size:
        ours, theirs = model.config.vocab_size, file.vocab_size
        file.fail(f"has a vocabulary of {theirs} tokens, the model one of {ours}")
    if llama_cut(tokenizer, text, length)[: len(file.cut)] != file.cut:
        file.fail("was made of another text, or with another tokenizer")
    return _Base(with_start(tokenizer, file.cut), 1, lambda rows: file.read())


def _compared(
    model: Model, base: _Base, progress: Callable[[int, int], object] | None
) -> Divergence:
    others = () if base.model is None else (base.model.weights,)
    programs = CachedPrograms(model, (model.weights, *others), current_selection())
    network = None if base.model is None else base.model.network
    program = CompareTokens(model.network, base=network)
    parts, done, first = [], 0, len(base.windows[0]) // 2
    for rows in batches(base.windows, base.batch):
        arguments = hidden_states(model, rows, first), base.read(rows), _targets(rows, first)
        with programs.context(), jax.transfer_guard_device_to_host("allow"):
            compared = programs.ready(program, *arguments)(programs.weights, *arguments)
            parts.append(jax.tree.map(np.asarray, compared))
        done += len(rows)
        if progress is not None:
            progress(done, len(base.windows))
    columns = ("divergence", "nats", "base_nats", "agrees")
    arrays = [np.concatenate([getattr(part, name) for part in parts]) for name in columns]
    divergences, nats, base_nats = (x.astype(np.float64) for x in arrays[:3])
    return Divergence(divergences, nats, base_nats, arrays[3])


def _targets(rows: list[list[int]], first: int) -> np.ndarray:
    return np.concatenate([np.array(row[first + 1 :], np.int32) for row in rows])
