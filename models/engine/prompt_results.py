"""Collects what requests want of their prompts' tokens: log-probabilities, embeddings.

A step starts the programs of `prompt_programs` on the hidden states of its pieces, one for each
kind of results. A preempted prompt is computed again from its beginning, so its pieces may come
twice.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from ..runner.prompt_programs import PoolTokens, ReadTokens, ScoreTokens
from ..sampling import Sampling
from ..sampling.stages import USUAL_LOGPROBS
from .outputs import TokenLogprobs
from .plan import Piece

#: Sampling parameters of a request that wants results of its prompt alone.
PROMPT_ALONE = Sampling(max_new_tokens=0, prompt_logprobs=0)

#: A piece and its row in the prefill program.
Placed = tuple[int, Piece]

#: (kind of program, arguments behind weights and hidden states, fields besides sizes) -> results.
Call = Callable[..., Any]


def results_of(piece: Piece) -> Any:
    """Returns the PromptResults that the piece is to add to; None without any, or if they exist."""
    return None if piece.sequence.can_reuse else piece.sequence.owner.prompt_results


def start(pieces: list[Placed], shape: tuple[int, int], call: Call) -> list[Started]:
    """Starts the programs for the results that a step's pieces are to have.

    shape: rows and tokens of the prefill program.
    """
    groups: dict[Any, list[Placed]] = {}
    for row, piece in pieces:
        if (results := results_of(piece)) is not None:
            groups.setdefault(results.kind, []).append((row, piece))
    return [results_of(own[0][1]).start(own, shape, call) for own in groups.values()]


class Started(NamedTuple):
    """A program in progress.

    Attributes:
      arrays: its results, on the device.
      rows: row of each of its pieces in the prefill program.
      take: returns a piece's results, by its index in `rows` and `arrays` in NumPy.
    """

    arrays: Any
    rows: list[int]
    take: Callable[[int, Any], Any]

    def values(self) -> dict[int, Any]:
        """Waits for the results; returns those of each row."""
        arrays = jax.tree.map(np.asarray, self.arrays)
        return {row: self.take(i, arrays) for i, row in enumerate(self.rows)}


class PromptResults(ABC):
    """Results of one prompt, collected from its pieces."""

    def __init__(self, length: int) -> None:
        """Prepares results of a prompt of `length` tokens."""
        self.length = length

    @property
    def kind(self) -> Any:
        """Key of prompts that one program serves."""
        return type(self)

    @abstractmethod
    def start(self, pieces: list[Placed], shape: tuple[int, int], call: Call) -> Started:
        """Starts the program for pieces of prompts of this kind.

        shape: rows and tokens of the prefill program.
        """

    @abstractmethod
    def put(self, first: int, value: Any) -> None:
        """Stores the results of the piece that begins at position `first`."""


class PromptLogprobs(PromptResults):
    """Log-probabilities of a prompt's tokens.

    Attributes:
      entries: one per token; the first has none.
    """

    def __init__(self, length: int, top: int) -> None:
        """Prepares results; top: number of most likely tokens."""
        super().__init__(length)
        self.entries: list[TokenLogprobs | None] = [None] * length
        self._top = top

    def start(self, pieces: list[Placed], shape: tuple[int, int], call: Call) -> Started:
        """Starts scoring the tokens that follow those of the pieces, within their prompts."""
        rows, time = shape
        places: list[int] = []
        following: list[int] = []
        ends = [0]
        tops = [results_of(piece)._top for _, piece in pieces]
        for row, piece in pieces:
            first, sequence = piece.first, piece.sequence
            last = min(first + piece.count, sequence.prompt_length - 1)
            following += sequence.tokens[first + 1 : last + 1]
            places += range(row * time, row * time + max(last - first, 0))
            ends.append(len(places))
        tokens = np.zeros((2, rows * time), np.int32)
        tokens[:, : len(places)] = places, following
        top = USUAL_LOGPROBS if any(tops) else 0  # few programs
        scores = call(ScoreTokens, tokens, np.int32(len(places)), top=top)

        def take(index: int, scores: Any) -> list[TokenLogprobs]:
            part, top = slice(*ends[index : index + 2]), tops[index]
            found = scores.logprobs
            arrays = found.chosen, found.tokens[:, :top], found.likeliest[:, :top], scores.ranks
            columns = (array[part].tolist() for array in arrays)
            return [
                TokenLogprobs(chosen, list(zip(ids, values, strict=True)), rank)
                for chosen, ids, values, rank in zip(*columns, strict=True)
            ]

        return Started(scores, [row for row, _ in pieces], take)

    def put(self, first: int, value: list[TokenLogprobs]) -> None:
        self.entries[first + 1 : first + 1 + len(value)] = value


class TokenVectors(PromptResults):
    """Hidden states of every token."""

    def __init__(self, length: int, *, normed: bool = True, normalize: bool = False) -> None:
        """Prepares results.

        normed: whether to take outputs of the final norm instead of its inputs. normalize: whether
        to divide each vector by its length.
        """
        super().__init__(length)
        self._normed, self._normalize = normed, normalize
        self._vectors = np.zeros((length, 0), np.float32)

    @property
    def kind(self) -> Any:
        """Key of prompts that one program serves."""
        return type(self), self._normed

    def start(self, pieces: list[Placed], shape: tuple[int, int], call: Call) -> Started:
        """Starts the final norm, or a copy."""

        def take(index: int, vectors: np.ndarray) -> np.ndarray:
            row, piece = pieces[index]
            found: np.ndarray = vectors[row, : piece.count]
            return found

        arrays = call(ReadTokens, normed=self._normed)
        return Started(arrays, [row for row, _ in pieces], take)

    def put(self, first: int, value: np.ndarray) -> None:
        if not self._vectors.size:
            self._vectors = np.zeros((self.length, value.shape[1]), np.float32)
        self._vectors[first : first + len(value)] = value

    def value(self) -> np.ndarray:
        """Returns float32 (length, hidden_size)."""
        return normalized(self._vectors) if self._normalize else self._vectors


class PooledVector(PromptResults):
    """Sum of the tokens' outputs of the final norm, each times its share."""

    def __init__(self, length: int, pooling: str, *, normalize: bool = False) -> None:
        """Prepares results.

        pooling: "mean", "last" or "cls". normalize: whether to divide the vector by its length.
        """
        super().__init__(length)
        self._pooling, self._normalize = pooling, normalize
        self._vector = np.zeros(0, np.float32)

    def start(self, pieces: list[Placed], shape: tuple[int, int], call: Call) -> Started:
        """Starts the sums of the pieces."""
        shares = np.zeros(shape, np.float32)
        for row, piece in pieces:
            shares[row, : piece.count] = results_of(piece)._shares(piece)
        rows = [row for row, _ in pieces]
        return Started(call(PoolTokens, shares), rows, lambda i, sums: sums[rows[i]])

    def _shares(self, piece: Piece) -> np.ndarray:
        if self._pooling == "mean":
            return np.full(piece.count, 1 / self.length, np.float32)
        positions = np.arange(piece.first, piece.first + piece.count)
        found = positions == (0 if self._pooling == "cls" else self.length - 1)
        return found.astype(np.float32)

    def put(self, first: int, value: np.ndarray) -> None:
        self._vector = value if first == 0 else self._vector + value

    def value(self) -> np.ndarray:
        """Returns float32 (hidden_size,)."""
        return normalized(self._vector) if self._normalize else self._vector


def vectors_of(length: int, pooling: str, normalize: bool) -> TokenVectors | PooledVector:
    """Returns empty results for the embedding of a text of `length` tokens."""
    if pooling == "none":
        return TokenVectors(length, normalize=normalize)
    return PooledVector(length, pooling, normalize=normalize)


def normalized(vectors: np.ndarray) -> np.ndarray:
    """Divides vectors (..., hidden_size) by their length; those of length 0 stay."""
    size = np.linalg.norm(vectors, axis=-1, keepdims=True)
    found: np.ndarray = vectors / np.where(size > 0, size, np.float32(1))
    return found
