"""Files of a base model's log-probabilities, as llama.cpp's `llama-perplexity` writes and reads.

A file has the tokens of a text, cut into windows, and for each token of a window's second half the
log-probabilities of the vocabulary: two float32, `scale` and the least log-probability, and one
uint16 `code` per token, for a log-probability of least + scale * code. The least one is at most 16
below the largest.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Callable, Iterator
from typing import BinaryIO, NoReturn

import jax
import numpy as np

from jax_q4k import current_selection
from jax_q4k.cache.atomic_files import replacing

from ..runner.model import Model
from ..runner.program_cache import CachedPrograms
from ..runner.prompt_programs import TokenLogits
from .estimates import Estimate, exponential, mean_of
from .perplexity import checked, hidden_states, llama_cut, with_start

_MAGIC = b"_logits_"
_HEAD = struct.Struct("<III")  # tokens of a window, tokens of the vocabulary, windows
_RANGE = np.float32(16)  # log-probabilities further below the largest one become the least
_CODES = np.float32(65535)
_MOST_TOKENS = 1 << 24  # of a text
_BESIDE = 4  # uint16 before the codes of a token: the two float32


class BaseLogitsError(ValueError):
    """A file of log-probabilities is malformed, or does not belong to the model or the text."""


def save_base_logits(
    model: Model,
    text: str,
    path: str | os.PathLike[str],
    *,
    context: int | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> Estimate:
    """Writes a model's log-probabilities of a text, for `kl_divergence` and llama.cpp.

    A file takes two bytes for each token of the vocabulary and each token of the windows' second
    halves: 65 MB for a window of 512 tokens and a vocabulary of 128,256. A failure leaves no file.

    Args:
      context: tokens per window, BOS included; None means the model's context length, at most 512.
      progress: called with (windows done, number of windows).

    Returns:
      The model's perplexity of the tokens in the second halves.

    Raises:
      ValueError: as `score` does; a model on several devices; logits that are NaN or infinite.
        TypeError: the context is not an integer. OSError: the file cannot be written.
    """
    tokenizer, length = checked(model, context)
    if model.placement is not None:
        raise ValueError("save_base_logits takes a model on one device, without a mesh")
    cut = llama_cut(tokenizer, text, length)
    vocab, first = model.config.vocab_size, length // 2
    programs = CachedPrograms(model, model.weights, current_selection())
    program = TokenLogits(model.network)
    nats: list[np.ndarray] = []
    with replacing(path, ".logits") as partial, open(partial, "wb") as file:
        file.write(_MAGIC + _HEAD.pack(length, vocab, len(cut)))
        file.write(np.array(cut, "<i4").tobytes())
        for done, window in enumerate(with_start(tokenizer, cut), 1):
            vectors = hidden_states(model, [window], first)
            with programs.context(), jax.transfer_guard_device_to_host("allow"):
                logits = np.asarray(programs.ready(program, vectors)(programs.weights, vectors))
            file.write(encoded(logits))
            nats.append(_nats(logits, window[first + 1 :]))
            if progress is not None:
                progress(done, len(cut))
    return exponential(mean_of(np.concatenate(nats)))


def _nats(logits: np.ndarray, tokens: list[int]) -> np.ndarray:
    """Returns -log p of `tokens`, float64 (n,), given logits (n, vocab_size)."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    sums = np.exp(shifted).sum(axis=1, dtype=np.float64)
    found: np.ndarray = np.log(sums) - shifted[np.arange(len(tokens)), tokens]
    return found


def encoded(logits: np.ndarray) -> bytes:
    """Returns the bytes of a file for logits float32 (n, vocab_size).

    Raises ValueError for NaN or infinite ones.
    """
    if not np.isfinite(logits).all():
        raise ValueError("the model's logits are NaN or infinite")
    largest = logits.max(axis=1, keepdims=True)
    least = np.maximum(logits.min(axis=1, keepdims=True), largest - _RANGE)
    sums = np.exp(logits - largest).sum(axis=1, keepdims=True, dtype=np.float64)
    scale = (largest - least) / _CODES
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)
    codes = np.rint(inverse * np.maximum(logits - least, 0))
    count, vocab = logits.shape
    found = np.zeros((count, _BESIDE + vocab + vocab % 2), "<u2")
    floats = np.concatenate([scale, least - largest - np.log(sums).astype(np.float32)], axis=1)
    found[:, :_BESIDE] = floats.astype("<f4").view("<u2")
    found[:, _BESIDE : _BESIDE + vocab] = np.minimum(codes, _CODES)
    return found.tobytes()


class BaseLogits:
    """An open file of log-probabilities.

    Attributes:
      name: the file.
      length: tokens of a window.
      vocab_size: tokens of the vocabulary.
      cut: tokens of each window, before BOS replaces the first ones.
    """

    def __init__(self, file: BinaryIO, name: str) -> None:
        """Reads the beginning of a file; raises BaseLogitsError if it is malformed."""
        self.name, self._file = name, file
        head = file.read(len(_MAGIC) + _HEAD.size)
        if head[: len(_MAGIC)] != _MAGIC or len(head) < len(_MAGIC) + _HEAD.size:
            self.fail("has no log-probabilities of llama.cpp's perplexity")
        self.length, self.vocab_size, windows = _HEAD.unpack(head[len(_MAGIC) :])
        if self.length < 3 or not self.vocab_size or not windows:
            described = f"{windows} windows of {self.length} tokens, vocabulary {self.vocab_size}"
            self.fail(f"must have windows of tokens, not {described}")
        self._row = _BESIDE + self.vocab_size + self.vocab_size % 2
        self.rows = self.length - 1 - self.length // 2
        size = os.fstat(file.fileno()).st_size
        wanted = file.tell() + windows * (4 * self.length + 2 * self.rows * self._row)
        if size < wanted:
            self.fail(f"is cut off: it has {size} of {wanted} bytes")
        if windows * self.length > _MOST_TOKENS:
            self.fail(f"must have at most {_MOST_TOKENS} tokens, not {windows * self.length}")
        tokens = np.frombuffer(file.read(4 * windows * self.length), "<i4")
        self.cut: list[list[int]] = tokens.reshape(windows, self.length).tolist()

    def fail(self, problem: str) -> NoReturn:
        raise BaseLogitsError(f"{self.name} {problem}")

    def read(self) -> tuple[np.ndarray, np.ndarray]:
        """Reads the next window.

        Returns the codes uint16 (rows, vocab_size), and each row's scale and least log-probability,
        float32 (rows, 2).
        """
        data = self._file.read(2 * self.rows * self._row)
        if len(data) < 2 * self.rows * self._row:
            self.fail("shrank while it was read")
        rows = np.frombuffer(data, "<u2").reshape(self.rows, self._row)
        ranges = np.ascontiguousarray(rows[:, :_BESIDE]).view("<f4")
        if not np.isfinite(ranges).all():
            self.fail("has log-probabilities that are NaN or infinite")
        return rows[:, _BESIDE : _BESIDE + self.vocab_size], ranges


@contextlib.contextmanager
def opened_logits(path: str | os.PathLike[str]) -> Iterator[BaseLogits]:
    """Opens a file of log-probabilities; raises BaseLogitsError if it is malformed."""
    name = os.fsdecode(path)
    if os.path.exists(path) and not os.path.isfile(path):  # a pipe could block forever
        raise BaseLogitsError(f"{name} must be a regular file")
    with open(path, "rb") as file:
        yield BaseLogits(file, name)
