"""Splits fused tensors of GGUF files, such as attn_qkv, when reading; fuses them when writing."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy as np

from jax_q4k import GGUFError, gguf

from ..architectures.tensor_tables import SCALES
from ..config import Config
from ..config.fused_names import ALWAYS, fused_names, parts_of
from ..config.tensors import expected_tensors


def split(
    config: Config, tensors: Mapping[str, gguf.TensorInfo], file: str
) -> dict[str, gguf.TensorInfo]:
    """Returns a file's tensors with each fused tensor replaced by its parts.

    Each part gets the scales of the fused tensor.

    Raises GGUFError if a fused tensor has another shape, or the file also holds a part.
    """
    fused = {name: parts for name in tensors if (parts := parts_of(config, name))}
    if not fused:
        return dict(tensors)
    expected, found = expected_tensors(config), {}
    for name, info in tensors.items():
        parts = fused.get(name, ())
        if any(part not in expected for part in parts) or _is_unfused(name, parts, tensors):
            parts = ()
        is_scale = _suffix(name) in SCALES
        if is_scale and _with_suffix(name) not in tensors:  # the weights are not fused
            parts = ()
        if not parts:
            found[name] = info
            continue
        if present := [part for part in parts if part in tensors and part != name]:
            raise GGUFError(file, f"tensor {name!r}", f"is present in addition to {present[0]!r}")
        first = expected[parts[0]].shape
        at = max(len(first) - (2 if _suffix(name) == "weight" else 1), 0)
        rows = [expected[part].shape[at] for part in parts]
        shape = (*first[:at], rows[0] if is_scale else sum(rows), *first[at + 1 :])
        if info.shape != shape:
            problem = f"has shape {info.shape}, expected {shape}"
            raise GGUFError(file, f"tensor {name!r}", problem)
        if at == len(shape) - 1 and any(count % info.block_size for count in rows):
            problem = f"holds {' + '.join(map(str, rows))} elements in blocks of {info.block_size}"
            raise GGUFError(file, f"tensor {name!r}", problem)
        starts = itertools.repeat(0) if is_scale else itertools.accumulate(rows, initial=0)
        for part, start, count in zip(parts, starts, rows, strict=False):
            found[part] = info.part(part, start, count, at)
    return found


def held_in(config: Config, names: Collection[str]) -> frozenset[str]:
    """Returns the fused tensors among the names of a file's tensors."""
    return frozenset(
        name
        for name in names
        if (parts := parts_of(config, name)) and not _is_unfused(name, parts, names)
    )


def _is_unfused(name: str, parts: tuple[str, ...], tensors: Collection[str]) -> bool:
    """Returns whether `ffn_up` is not fused, since the file also has `ffn_gate`."""
    return name in parts and all(_with_suffix(part) in tensors for part in parts)


def _suffix(name: str) -> str:
    return name.rpartition(".")[2]


def _with_suffix(name: str, suffix: str = "weight") -> str:
    """Returns the name of a related tensor, such as the bias of a weight."""
    return f"{name.rpartition('.')[0]}.{suffix}"


def joined(
    config: Config, tensors: Mapping[str, gguf.TensorPieces], file: str
) -> dict[str, gguf.TensorPieces]:
    """Fuses tensors as in the architecture's files; the inverse of `split`.

    Parts with different types or scales are not fused. Raises GGUFError if files must fuse them.
    """
    found = dict(tensors)
    for fused, parts in fused_names(config, tensors):
        pieces = [tensors[part] for part in parts]
        types = sorted({piece.type for piece in pieces})
        scales = [_scales(part, tensors) for part in parts]
        problem = f"the types {', '.join(types)}" if len(types) > 1 else ""
        if any(one != scales[0] for one in scales):
            problem = problem or "different scales"
        if problem:
            if any(f".{short}." in fused for short in ALWAYS):
                problem = f"holds {' and '.join(parts)}, which have {problem}"
                raise GGUFError(file, f"tensor {fused!r}", problem)
            continue
        for part, suffix in itertools.product(parts, scales[0]):
            scale = found.pop(_with_suffix(part, suffix))
            found[_with_suffix(fused, suffix)] = scale
        for part in parts:
            del found[part]
        shape = _shape([piece.shape for piece in pieces], _of_experts(fused))
        found[fused] = gguf.TensorPieces(types[0], shape, _chained(pieces, _of_experts(fused)))
    return found


def _of_experts(fused: str) -> bool:
    """Returns whether a fused tensor is fused within each expert."""
    return "_exps." in fused


def _shape(parts: list[tuple[int, ...]], of_experts: bool) -> tuple[int, ...]:
    """Returns the shape of the tensor fused from parts of these shapes."""
    first = parts[0]
    return (*first[:of_experts], sum(part[of_experts] for part in parts), *first[of_experts + 1 :])


def _scales(
    name: str, tensors: Mapping[str, gguf.TensorPieces]
) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Returns suffix -> (type, shape, bytes) of the scales of a weight."""
    if _suffix(name) != "weight":
        return {}
    held = {suffix: tensors.get(_with_suffix(name, suffix)) for suffix in SCALES}
    return {
        suffix: (scale.type, scale.shape, b"".join(bytes(piece) for piece in scale.made()))
        for suffix, scale in held.items()
        if scale is not None
    }


def _chained(pieces: list[gguf.TensorPieces], of_experts: bool) -> Callable[[], Iterator[Any]]:
    """Returns a function that yields the bytes of the tensor fused from parts.

    The parts are concatenated, with `of_experts` within each expert.
    """
    if not of_experts:
        return lambda: itertools.chain.from_iterable(piece.pieces() for piece in pieces)
    return lambda: itertools.chain.from_iterable(zip(*map(_by_expert, pieces), strict=True))


def _by_expert(stack: gguf.TensorPieces) -> Iterator[bytes]:
    """Yields the bytes of each expert's matrix in a stack."""
    held, size = bytearray(), stack.nbytes // stack.shape[0]
    for piece in stack.made():
        held += np.ascontiguousarray(piece).tobytes()
        while len(held) >= size:
            yield bytes(held[:size])
            del held[:size]


def types_by_file(
    config: Config,
    shapes: Mapping[str, tuple[int, ...]],
    types: Callable[[dict[str, tuple[int, ...]]], dict[str, str]],
) -> dict[str, str]:
    """Returns tensor name -> ggml type name, with one type for all parts of a fused tensor.

    types: function that chooses types: name -> shape of a file's tensors, fused ones included, to
    name -> type.
    """
    parts_of_fused, in_files = dict(fused_names(config, shapes)), dict(shapes)
    for fused, parts in parts_of_fused.items():
        for part in parts:
            del in_files[part]
        in_files[fused] = _shape([shapes[part] for part in parts], _of_experts(fused))
    chosen = types(in_files)
    of_parts = {part: chosen[fused] for fused, parts in parts_of_fused.items() for part in parts}
    return {name: of_parts[name] if name in of_parts else chosen[name] for name in shapes}
