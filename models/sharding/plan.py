"""Plans a model's sharding: which axis of each tensor is split over which mesh axis."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_q4k import formats

from ..architectures.tensor_tables import SCALES
from ..config import Config
from ..config.tensors import expected_tensors
from ..support.warn import warn
from .placement import Placement

#: Names of mesh axes for tensor parallelism; a mesh with a single axis may use any other name.
TENSOR_AXES = ("tp", "model", "tensor")

#: Names of mesh axes for data parallelism, which splits batch rows and their pages.
DATA_AXES = ("dp", "data", "batch")

_OF_KV = ("attn_k", "attn_v")

#: GGUF tensor name without `blk.N.` and `.weight` or `.bias` -> partition of the tensor's axes.
Rules = Mapping[str, PartitionSpec]


def tensor_axis(mesh: Mesh) -> str | None:
    """Returns the mesh axis for tensor parallelism; None if the only axis is for batches.

    Raises ValueError if the mesh has several axes, none of them in TENSOR_AXES.
    """
    if len(mesh.axis_names) == 1:
        (name,) = mesh.axis_names
        return None if name in DATA_AXES else str(name)
    for name in TENSOR_AXES:
        if name in mesh.axis_names:
            return name
    raise ValueError(
        f"mesh has axes {', '.join(map(repr, mesh.axis_names))}; tensors are split over one named "
        f"{' or '.join(map(repr, TENSOR_AXES))}"
    )


def plan_sharding(
    config: Config, tensors: Mapping[str, Any], mesh: Mesh, rules: Rules | None = None
) -> Placement:
    """Chooses the sharding of each of `tensors`, by rules for tensor parallelism.

    Args:
      tensors: GGUF names -> anything with `.shape` and a ggml `.type`.
      rules: tensors without a rule are replicated. None means Megatron's rules
        (https://arxiv.org/abs/1909.08053). They split the first projections of attention and MLP by
        rows and the last by columns, so that a layer needs two all-reduces. If columns cannot be
        split between quantization blocks, rows are split. If rows do not divide either, the tensor
        is replicated.

    Raises:
      TypeError: `mesh` is not a Mesh. ValueError: a rule names an unknown tensor or mesh axis, or
        splits within a row or quantization block.
    """
    if not isinstance(mesh, Mesh):
        raise TypeError(f"mesh is a {type(mesh).__name__}; it must be a jax.sharding.Mesh")
    axis = tensor_axis(mesh)
    # An axis of one device would split nothing, but be part of the types of explicit meshes.
    data = next((name for name in DATA_AXES if mesh.shape.get(name, 1) > 1), None)
    if rules is None:
        specs = _megatron(config, tensors, mesh, axis)
    else:
        specs = _ruled(tensors, mesh, rules)
    tensors_at = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    return Placement(mesh, axis, data, tensors_at)


def short_name(name: str) -> str:
    """Maps `blk.3.attn_q.weight` to `attn_q`."""
    parts = name.split(".")
    return parts[2] if parts[0] == "blk" and len(parts) > 2 else parts[0]


def _units(info: Any) -> tuple[int, ...]:
    """Returns the number of indivisible units per axis: rows, and quantization blocks along k."""
    *leading, k = info.shape
    return (*leading, k // _block(info))


def _block(info: Any) -> int:
    """Returns the block size along k; 1 for a tensor that is not packed."""
    name = getattr(getattr(info, "type", None), "name", None)
    return formats.get(name).block_size if name in formats.names() else 1


def _megatron(
    config: Config, tensors: Mapping[str, Any], mesh: Mesh, axis: str | None
) -> dict[str, PartitionSpec]:
    devices, expected = mesh.shape[axis] if axis else 1, expected_tensors(config)
    specs, replicated = {}, set()
    for name, info in tensors.items():
        what, short, units = expected[name], short_name(name), _units(info)
        split, is_matrix = what.split, what.suffix is None and what.entry.is_matrix
        fits = [at for at in (split, 0) if at is not None and units[at] % devices == 0]
        if _heads_of(config, name, devices) % devices:
            fits = []
        if split is None or not fits:
            specs[name] = PartitionSpec()
            if split is not None or is_matrix:
                replicated.add(short)
        else:
            specs[name] = PartitionSpec(*[None] * fits[0], axis)
    if replicated and devices > 1:
        names = ", ".join(sorted(replicated))
        warn(f"replicated on each of {devices} devices, because they cannot be split: {names}")
    return specs


def _heads_of(config: Config, name: str, otherwise: int) -> int:
    """Returns the number of heads in an attention projection; `otherwise` for other tensors."""
    short = short_name(name)
    if short == "attn_q":
        return config.num_heads
    return config.kv_heads_of(int(name.split(".")[1])) if short in _OF_KV else otherwise


def _ruled(tensors: Mapping[str, Any], mesh: Mesh, rules: Rules) -> dict[str, PartitionSpec]:
    known = {short_name(name) for name in tensors}
    for name, spec in rules.items():
        if name not in known:
            raise ValueError(
                f"rules[{name!r}]: the model has no such tensor; it has {', '.join(sorted(known))}"
            )
        if not isinstance(spec, PartitionSpec):
            raise TypeError(
                f"rules[{name!r}] is a {type(spec).__name__}; it must be a PartitionSpec"
            )
    specs = {}
    for name, info in tensors.items():
        spec = rules.get(short_name(name), PartitionSpec())
        if name.endswith(".bias"):  # has rows only, and is added after the sum over columns
            spec = PartitionSpec(*spec[:1])
        elif name.endswith(tuple(f".{suffix}" for suffix in SCALES)):
            spec = PartitionSpec()
        specs[name] = _checked(name, info, mesh, spec)
    return specs


def _checked(name: str, info: Any, mesh: Mesh, spec: PartitionSpec) -> PartitionSpec:
    units = _units(info)
    if len(spec) > len(units):
        raise ValueError(f"rules: {spec} has {len(spec)} axes; tensor {name!r} has {len(units)}")
    for at, entry in enumerate(spec):
        axes = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
        for axis in axes:
            if axis not in mesh.axis_names:
                has = ", ".join(map(repr, mesh.axis_names))
                raise ValueError(f"rules: the mesh has no axis {axis!r} for {name!r}; it has {has}")
        parts = math.prod(mesh.shape[axis] for axis in axes)
        if units[at] % parts:
            size, block = info.shape[at], _block(info) if at == len(units) - 1 else 1
            blocks = f"its {units[at]} blocks of {block}" if block > 1 else "it"
            raise ValueError(
                f"tensor {name!r}: axis {at} of {size} cannot be split into {parts}: {blocks} "
                "must divide evenly"
            )
    return spec
