"""Collects importance matrices, as llama.cpp's `llama-imatrix` does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import jax
import numpy as np

from jax_q4k import current_selection

from ..config.fused_names import fused_names, parts_of
from ..config.tensors import expected_tensors
from ..network.observing import present_matrices
from ..runner.imatrix import ImportanceMatrix, SquareSums
from ..runner.model import Model
from ..runner.program_cache import CachedPrograms
from .perplexity import checked, llama_windows

_OUTPUT = "output.weight"


def imatrix(
    model: Model,
    text: str,
    *,
    context: int | None = None,
    first: int = 0,
    chunks: int | None = None,
    output: bool = False,
    parse_special: bool = False,
    dataset: str = "",
    progress: Callable[[int, int], object] | None = None,
) -> ImportanceMatrix:
    """Sums the squared inputs of all matrices of a model over the tokens of a text.

    `quantize` then weights the errors of a matrix's columns by their means. The text is cut into
    chunks like those of `score` with windows="llama.cpp". For experts only the tokens that use an
    expert count. The sums are those of llama.cpp's `llama-imatrix` up to rounding; call it within
    `jax_q4k.implementation(activations="f32")` for activations that are not rounded to int8.

    Args:
      context: tokens per chunk, BOS included; None means the model's context length, at most 512.
      first: chunks at the beginning of the text to leave out.
      chunks: maximum number of chunks; None means all of the text.
      output: include the output matrix, unless it is tied to the embedding.
      parse_special: parse control tokens in the text.
      dataset: name of the text in saved files.
      progress: called with (chunks done, number of chunks).

    Raises:
      ValueError: as `score` does; no chunks are left; a model on several devices; activations that
        are NaN or infinite, with the tensor's name. TypeError: the context is not an integer.
    """
    matrix = ImportanceMatrix({}, {})
    for done, total, found in collected(
        model,
        text,
        context=context,
        first=first,
        chunks=chunks,
        output=output,
        parse_special=parse_special,
        dataset=dataset,
    ):
        matrix = found
        if progress is not None:
            progress(done, total)
    return matrix


def collected(
    model: Model,
    text: str,
    *,
    context: int | None = None,
    first: int = 0,
    chunks: int | None = None,
    output: bool = False,
    parse_special: bool = False,
    dataset: str = "",
) -> Iterator[tuple[int, int, ImportanceMatrix]]:
    """Like `imatrix`, but yields (chunks done, number of chunks, sums so far) after every chunk."""
    tokenizer, length = checked(model, context)
    if first < 0:
        raise ValueError(f"first={first} must not be negative")
    if chunks is not None and chunks < 1:
        raise ValueError(f"chunks={chunks} must be positive")
    if model.placement is not None:
        raise ValueError("imatrix takes a model on one device, without a mesh")
    windows = llama_windows(tokenizer, text, length, parse_special=parse_special)
    used = windows[first:] if chunks is None else windows[first : first + chunks]
    if not used:
        raise ValueError(f"no chunks are left: the text has {len(windows)}, and first={first}")
    names = present_matrices(model.decoder()) - (set() if output else {_OUTPUT})
    program = SquareSums(model.network, names=tuple(sorted(names)))
    programs = CachedPrograms(model, model.weights, current_selection())
    total = ImportanceMatrix({}, {}, (dataset,), 0, length)
    for done, window in enumerate(used, 1):
        tokens = np.array([window], np.int32)
        with programs.context(), jax.transfer_guard_device_to_host("allow"):
            sums = programs.ready(program, tokens)(programs.weights, tokens)
            arrays = jax.tree.map(lambda x: np.asarray(x, np.float64), sums)
        new = _in_file(model, arrays)
        for name, of_tensor in new.items():
            if not np.isfinite(of_tensor[0]).all():
                raise ValueError(
                    f"the activations of {name!r} are NaN or infinite in chunk {first + done}"
                )
        chunk = ImportanceMatrix(
            {name: of_tensor[0] for name, of_tensor in new.items()},
            {name: of_tensor[1] for name, of_tensor in new.items()},
            (dataset,),
            1,
            length,
        )
        total = total.added(chunk)
        yield done, len(used), total


def _in_file(
    model: Model, found: Mapping[str, tuple[np.ndarray, np.ndarray]]
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Returns sums and counts as in llama.cpp's files, by the names of tensors there.

    The parts of a fused tensor have the same inputs, and become one entry. Matrices of heads become
    one row.
    """
    config = model.config
    expected, entries = expected_tensors(config), {}
    for name, (sums, counts) in found.items():
        if sums.ndim == 2 and "experts" not in expected[name].entry.shape.split():
            sums, counts = sums.reshape(-1), counts[0]  # every token uses every head
        entries[name] = sums, np.atleast_1d(counts)
    fused_parts: Iterable[tuple[str, tuple[str, ...]]] = fused_names(config, entries)
    if model.fused is not None:
        fused_parts = [(name, parts_of(config, name)) for name in model.fused]
    for fused, parts in fused_parts:
        if not all(part in entries for part in parts):
            continue
        of_parts = [entries.pop(part) for part in parts]
        entries[fused] = of_parts[0]
    return entries
