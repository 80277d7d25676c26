"""Runs texts through an encoder: in batches of similar lengths, without a KV cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jax_q4k import current_selection

from ..runner.encoder_programs import EncodeTexts, ScoreVectors
from ..runner.model import Model
from ..runner.program_cache import CachedPrograms
from .prompt_results import normalized

#: Tokens per batch, padding included; a longer text is a batch of its own.
TOKENS = 4096
MAX_ROWS = 64


class Text(NamedTuple):
    """Token ids of a text, or of a pair of texts.

    Attributes:
      ids: int32 (tokens,).
      second: position of the second text's first token; None means that there is one text.
      task: number of the task in `Model.tasks` whose adapter applies, from 1; 0 means none.
    """

    ids: np.ndarray
    second: int | None = None
    task: int = 0


class Vectors(NamedTuple):
    """Kind of vectors to compute of texts.

    Attributes:
      pooling: one of POOLINGS.
      normalize: whether vectors are divided by their length.
      dense: whether dense layers after pooling apply.
    """

    pooling: str
    normalize: bool = False
    dense: bool = True


class EncoderRuns:
    """Runs an encoder's programs with the implementation that is selected now."""

    def __init__(self, model: Model) -> None:
        self._model, selection = model, current_selection()
        self._programs = CachedPrograms(model, model.weights, selection)

    @property
    def compilations(self) -> int:
        """Number of programs that were compiled, or loaded from disk."""
        return self._programs.compilations

    def vectors(self, texts: Sequence[Text], wanted: Vectors) -> list[np.ndarray]:
        """Computes the vectors of a batch of texts, float32 (n,), or (tokens, n) without pooling.

        The program depends on the padded number of texts and the padded length of the longest one.
        """
        model, count = self._model, len(texts)
        longest = max(len(text.ids) for text in texts)
        time = min(model.padded_length(longest), model.config.context_length)
        rows = model.padded_batch(1 << (count - 1).bit_length())
        tokens = np.zeros((rows, time), np.int32)
        lengths, seconds = np.zeros(rows, np.int32), np.full(rows, time, np.int32)
        tasks = np.zeros(rows, np.int32)
        for row, text in enumerate(texts):
            tokens[row, : len(text.ids)] = text.ids
            lengths[row] = len(text.ids)
            seconds[row] = time if text.second is None else text.second
            tasks[row] = text.task
        program = EncodeTexts(model.network, pooling=wanted.pooling, dense=wanted.dense)
        found = self._run(program, tokens, lengths, seconds, tasks)
        rows_of = zip(found, lengths.tolist(), strict=True)
        vectors = [x[:length] if wanted.pooling == "none" else x for x, length in rows_of][:count]
        return [normalized(x) for x in vectors] if wanted.normalize else vectors

    def scores(self, vectors: np.ndarray) -> np.ndarray:
        """Returns the classification head's logits of vectors (n, hidden_size), (n, labels)."""
        count = len(vectors)
        rows = self._model.padded_batch(1 << (count - 1).bit_length())
        padded = np.zeros((rows, vectors.shape[1]), np.float32)
        padded[:count] = vectors
        return self._run(ScoreVectors(self._model.network), padded)[:count]

    def _run(self, program: Any, *arrays: np.ndarray) -> np.ndarray:
        model = self._model
        with self._programs.context():
            arguments = arrays if model.placement is None else model.put(arrays)
            run = self._programs.ready(program, *arguments)
            return np.asarray(run(model.weights, *arguments))


def batches(model: Model, lengths: Sequence[int]) -> Iterator[list[int]]:
    """Yields batches of texts as lists of indices, by descending number of tokens.

    lengths: number of tokens of each text.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    while order:
        count = min(max(TOKENS // model.padded_length(lengths[order[0]]), 1), MAX_ROWS)
        yield order[:count]
        order = order[count:]


def encoded(
    model: Model,
    texts: Sequence[Text],
    wanted: Vectors,
    progress: Callable[[int, int], object] | None = None,
) -> list[np.ndarray]:
    """Computes the vectors of texts of any lengths and number, in batches.

    progress: called with (texts done, number of texts).
    """
    runs, done = EncoderRuns(model), 0
    found: list[Any] = [None] * len(texts)
    for batch in batches(model, [len(text.ids) for text in texts]):
        vectors = runs.vectors([texts[i] for i in batch], wanted)
        for i, vector in zip(batch, vectors, strict=True):
            found[i] = vector
        done += len(batch)
        if progress is not None:
            progress(done, len(texts))
    return found
