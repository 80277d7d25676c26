"""Loads LoRA adapters (https://arxiv.org/abs/2106.09685).

Formats are folders of PEFT's `save_pretrained` and of `mlx_lm.lora`, GGUF files of llama.cpp's
`convert_lora_to_gguf.py`, and files of `examples/lora.py`. W + scale * B A is computed as
y + scale * B (A x), so that packed weights stay unchanged.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import jax
import numpy as np

from jax_q4k import CheckpointError, GGUFError, QuantizedArray, gguf

from ...architectures.base import CheckpointClass
from ...config import Config
from ...config.fused_names import parts_of
from ...config.tensors import Expected, expected_tensors
from ...network.adapters import adapted, named_linears, present
from ...network.parts import Parts
from ...runner.adapters import MAX_REACH, MAX_SCALE, Adapter, Pair, check_scale
from ...runner.model import Model
from ...support.json_fields import JSONFields
from ..checkpoints import tensor_locations
from ..checkpoints.checkpoint import in_rope_order, name_in_decoder, with_query_factor
from ..checkpoints.config_json import MAX_CONFIG
from ..checkpoints.safetensors import TYPES, Weights
from . import settings as lora_settings

if TYPE_CHECKING:
    from ...network.decoder import Decoder

_WEIGHTS, _CONFIG = "adapter_model.safetensors", "adapter_config.json"
_MLX_WEIGHTS = "adapters.safetensors"
_MLX = re.compile(r"(.+)\.lora_([ab])")
_PEFT = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_TRAINED = re.compile(r"(layers\.(\d+)\.)?([\w.]+)\.lora_([ab])")  # by examples/lora.py
_GGUF = re.compile(r"(.+\.weight)\.lora_([ab])")
_GGUF_KEYS = (
    "adapter.type",
    "adapter.lora.alpha",
    "adapter.lora.task_name",
    "adapter.lora.prompt_prefix",
)
_MAX_BETWEEN = 1e30  # of |A x| for |x| <= 1; activations x may be a million times as large

Fail: TypeAlias = Callable[[str, str], NoReturn]


def with_lora(model: Model, path: str | os.PathLike[str], *, scale: float = 1.0) -> Model:
    """Returns a model with a LoRA adapter; it shares the packed weights with `model`.

    Adapters can be combined: `with_lora(with_lora(model, a), b, scale=0.5)`.

    Args:
      path: a folder written by PEFT, with adapter_config.json and adapter_model.safetensors, or by
        mlx_lm.lora, with adapters.safetensors; the .safetensors file of either; a GGUF file written
        by llama.cpp's convert_lora_to_gguf; or a .safetensors file written by this package's
        examples/lora.py.
      scale: factor of the adapter, in addition to its own alpha / rank.

    Raises:
      jax_q4k.CheckpointError, jax_q4k.GGUFError: the file is malformed, belongs to another model,
        or is not supported: adapters of experts, embeddings, routers or norms, DoRA, and adapters
        whose training changed the base weights. Both are ValueErrors. ValueError: a scale that is
        not finite or too large; a model on several devices. OSError: it cannot be read.
    """
    check_scale(scale)
    if model.placement is not None:
        raise ValueError("model is on several devices; adapters need a model on one device")
    named = named_linears(model.config)
    pairs = read(path, model.config, frozenset(named))
    check_scale(scale, pairs)
    _check_present(model, pairs, os.fsdecode(path))
    parts = model.parts()
    adapters = {
        name: {
            "a": jax.device_put(pair.a),
            "b": jax.device_put(pair.b),
            "scale": jax.device_put(np.float32(scale * pair.scale)),
        }
        for name, pair in sorted(pairs.items())
    }

    def merge(state: dict[str, Any]) -> Decoder:
        return adapted(parts.merge(state["decoder"]), state["lora"])

    state = {"decoder": parts.state, "lora": adapters}
    changed = Parts(model.config, state, merge)
    found = Model(changed, model.tokenizer, model.metadata, tasks=model.tasks)
    found.program_cache, found.fused = model.program_cache, model.fused
    return found


def read_lora(path: str | os.PathLike[str], config: Config) -> Adapter:
    """Reads a LoRA adapter for a model with this configuration, for `Engine.load_adapter`.

    path: as in `with_lora`, which describes the formats and the errors.
    """
    return Adapter(read(path, config), os.fsdecode(path))


def _check_present(model: Model, pairs: Mapping[str, Pair], file: str) -> None:
    """Raises GGUFError for an adapter of a matrix that is optional and that `model` lacks."""
    expected, named = expected_tensors(model.config), named_linears(model.config)
    if optional := {name: named[name] for name in pairs if not expected[name].required}:
        for name in sorted(optional.keys() - present(model.decoder(), optional)):
            tied = ": its output is tied to the embedding" if name == "output.weight" else ""
            raise GGUFError(file, f"adapter of {name!r}", f"the model has no such matrix{tied}")


def read(
    path: str | os.PathLike[str], config: Config, targets: frozenset[str] | None = None
) -> dict[str, Pair]:
    """Reads a file of adapters, checked against a model's configuration.

    Returns GGUF name of a matrix -> its Pair. targets: matrices that may have an adapter.
    """
    file = Path(os.fsdecode(path))
    targets = frozenset(named_linears(config)) if targets is None else targets
    if not file.is_dir() and file.suffix != ".safetensors":
        return _from_gguf(file, config, targets)
    folder, weights = (file, file / _WEIGHTS) if file.is_dir() else (file.parent, file)
    if file.is_dir() and not weights.exists():
        weights = file / _MLX_WEIGHTS
        if not weights.exists():
            problem = f"is missing in the folder, and so is mlx-lm's {_MLX_WEIGHTS}"
            raise CheckpointError(str(file), _WEIGHTS, problem)
    if not weights.exists():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(weights))
    stored = Weights(weights)
    try:
        ours = all(_TRAINED.fullmatch(name) for name in stored.stored)
        if ours and stored.stored and not (folder / _CONFIG).exists():
            return _from_example(stored, str(weights), config, targets)
        return _from_modules(stored, weights, folder / _CONFIG, config, targets)
    finally:
        stored.close()


def files_of(path: str | os.PathLike[str]) -> list[Path]:
    """Returns the files that reading an adapter may open, whether they exist or not."""
    file = Path(os.fsdecode(path))
    folder = file if file.is_dir() else file.parent
    return [file, *(folder / name for name in (_CONFIG, _WEIGHTS, _MLX_WEIGHTS))]


def _from_modules(
    weights: Weights, file: Path, description: Path, config: Config, targets: frozenset[str]
) -> dict[str, Pair]:
    """Reads adapters of PEFT or mlx-lm, whose names are those of a checkpoint's modules."""
    if not description.exists():
        raise CheckpointError(str(file), _CONFIG, "is missing next to it")
    settings = lora_settings.read(JSONFields.read(description, MAX_CONFIG))
    fail = _failing(CheckpointError, str(file))
    paired = _paired(weights.stored, _MLX if settings.of_mlx else _PEFT, fail)
    modules: dict[str, str] = {}
    for name, both in paired.items():
        if (earlier := modules.setdefault(name_in_decoder(name), name)) != name:
            fail(f"tensor {both[0]!r}", f"is of the same module as {paired[earlier][0]!r}")
    checkpoint, names_of = _gguf_names(config, modules, fail)
    _check_types(weights, fail)
    pairs: dict[str, Pair] = {}
    expected = expected_tensors(config)
    for module, name in modules.items():
        names = paired[name]
        a, b = (weights.read(stored) for stored in names)
        if settings.of_mlx:
            a, b = a.T, b.T
        gguf_names = names_of[f"{module}.weight"]
        outputs = sum(expected[part].shape[0] for part, _ in gguf_names if part in expected)
        for part, rows in gguf_names:
            if part not in targets:
                fail(f"tensor {names[0]!r}", _not_adapted(part))
            _check_shapes(a, b, (outputs, expected[part].shape[-1]), names, fail)
            if settings.ranks is not None and a.shape[0] not in settings.ranks:
                ranks = ", ".join(map(str, sorted(settings.ranks)))
                problem = f"has rank {a.shape[0]}; r and rank_pattern in {_CONFIG} are {ranks}"
                fail(f"tensor {names[0]!r}", problem)
            of_part = in_rope_order(b[rows], expected[part].entry, config, checkpoint)
            of_part = with_query_factor(of_part, expected[part].entry, config)
            pair = Pair(a, of_part, settings.scale(name, a.shape[0]), names)
            _add(pairs, part, pair, fail)
    return pairs


def _gguf_names(
    config: Config, modules: Mapping[str, str], fail: Fail
) -> tuple[CheckpointClass, dict[str, list[tuple[str, slice]]]]:
    """Returns the checkpoint class that has all these modules, and which GGUF tensors they hold.

    The second result maps a tensor's name in checkpoints to (GGUF name, its rows) of each GGUF
    tensor that it holds.
    """
    classes = config.kind.checkpoints
    if not classes:
        fail(_CONFIG, f"names modules of checkpoints, but {config.architecture} has none")
    unknown = ""
    for checkpoint in classes:
        gguf_names: dict[str, list[tuple[str, slice]]] = {}
        for name, location in tensor_locations.locations(config, checkpoint).items():
            reordered = location.groups or location.channels or location.as_row or location.tiled
            if location.transposed is False and not reordered:
                for stored in location.names:
                    rows = slice(None) if location.of_experts else location.rows
                    gguf_names.setdefault(stored, []).append((name, rows))
        missing = [module for module in modules if f"{module}.weight" not in gguf_names]
        if not missing:
            return checkpoint, gguf_names
        unknown = unknown or missing[0]
    what = f"{config.architecture} model, or an adapter of it is not supported"
    fail(f"adapter of {modules[unknown]!r:.200}", f"matches no module of a {what}")


def _from_gguf(file: Path, config: Config, targets: frozenset[str]) -> dict[str, Pair]:
    fail = _failing(GGUFError, str(file))
    with gguf.TensorFile(file) as opened:
        fields = gguf.Fields(opened.header.metadata, str(file))
        for key, value in (
            ("general.type", "adapter"),
            ("adapter.type", "lora"),
            ("general.architecture", config.architecture),
        ):
            if key not in fields.values:
                fields.fail(key, f"is missing, expected {value!r}")
            if (found := fields.string(key)) != value:
                fields.fail(key, f"is {found!r:.100}, expected {value!r}")
        for key in fields.values:
            if key == "adapter.alora.invocation_tokens":
                fields.fail(key, "is present: activated LoRA is not supported")
            if key.startswith("adapter.") and key not in _GGUF_KEYS:
                fields.fail(key, "is not a known key, and may change the adapter")
        alpha = fields.number("adapter.lora.alpha", 0.0, most=MAX_SCALE, above=-MAX_SCALE)
        pairs: dict[str, Pair] = {}
        expected = expected_tensors(config)
        for name, both in _paired(opened.header.tensors, _GGUF, fail).items():
            a, b = (_floats(opened.read(stored)) for stored in both)
            parts: tuple[str, ...] = (name,)
            is_one = name in expected and b.shape[:1] == expected[name].shape[:1]
            if not is_one:
                parts = parts_of(config, name) or parts
            if unknown := [part for part in parts if part not in targets]:
                fail(f"tensor {both[0]!r}", _not_adapted(unknown[0]))
            if config.checkpoint_interleaved is not None:
                _check_unrotated(parts, expected, both, fail)
            counts = [expected[part].shape[0] for part in parts]
            _check_shapes(a, b, (sum(counts), expected[parts[0]].shape[-1]), both, fail)
            # An alpha of 0 counts as missing, as in llama.cpp.
            scale = alpha / a.shape[0] if alpha else 1.0
            ends = np.cumsum(counts)
            for part, start, end in zip(parts, ends - counts, ends, strict=True):
                of_part = with_query_factor(b[start:end], expected[part].entry, config)
                _add(pairs, part, Pair(a, of_part, scale, both), fail)
    return pairs


def _check_unrotated(
    parts: Sequence[str], expected: Mapping[str, Expected], names: tuple[str, str], fail: Fail
) -> None:
    """Fails for matrices that rope rotates: llama.cpp's converter ignores `rope_interleave`."""
    if rotated := [part for part in parts if expected[part].entry.rotated]:
        problem = f"is of {rotated[0]}, whose rows were reordered as rope_interleave says when the"
        problem += " model was converted; convert_lora_to_gguf does not: pass PEFT's folder"
        fail(f"tensor {names[0]!r}", problem)


def _from_example(
    weights: Weights, file: str, config: Config, targets: frozenset[str]
) -> dict[str, Pair]:
    """Reads adapters of this package's examples/lora.py.

    Their matrices are (k, rank) and (rank, n), named by module path, with rows in the decoder's
    order.
    """
    fail = _failing(CheckpointError, file)
    _check_types(weights, fail)
    name_at = {path: name for name, path in named_linears(config).items()}
    pairs: dict[str, Pair] = {}
    expected = expected_tensors(config)
    found: dict[str, dict[str, str]] = {}
    for name in weights.stored:
        match = _TRAINED.fullmatch(name)
        assert match is not None
        found.setdefault(name.rpartition(".")[0], {})[match[4]] = name
    for path, both in found.items():
        match = _TRAINED.fullmatch(f"{path}.lora_a")
        assert match is not None
        layer = int(match[2]) if match[2] and len(match[2]) < 7 else None
        target = name_at.get((layer, match[3])) if match[2] is None or layer is not None else None
        if target is None or target not in targets:
            fail(f"tensor {next(iter(both.values()))!r}", "matches no matrix of the model")
        if len(both) < 2:
            missing = {"a", "b"}.difference(both).pop()
            fail(f"tensor {next(iter(both.values()))!r}", f"is present without its lora_{missing}")
        a, b = (weights.read(both[end]) for end in "ab")
        if a.ndim == b.ndim == 2:
            a, b = a.T, b.T
        names = both["a"], both["b"]
        _check_shapes(a, b, expected[target].shape, names, fail)
        _add(pairs, target, Pair(a, b, 1.0, names), fail)
    return pairs


def _paired(
    names: Mapping[str, Any], pattern: re.Pattern[str], fail: Fail
) -> dict[str, tuple[str, str]]:
    """Returns adapted module -> names of its a and b tensors."""
    found: dict[str, dict[str, str]] = {}
    for name in names:
        match = pattern.fullmatch(name)
        if match is None:
            fail(f"tensor {name!r:.200}", "is not part of a LoRA adapter for matrices")
        found.setdefault(match[1], {})[match[2].lower()] = name
    if not found:
        fail("tensors", "are missing: there is no adapter")
    for both in found.values():
        if len(both) < 2:
            missing = {"a", "b"}.difference(both).pop()
            name = next(iter(both.values()))
            fail(f"tensor {name!r:.200}", f"is present without its lora_{missing}")
    return {name: (both["a"], both["b"]) for name, both in found.items()}


def _add(pairs: dict[str, Pair], matrix: str, pair: Pair, fail: Fail) -> None:
    """Adds a pair to `pairs`; fails for a matrix's second adapter, or a huge one."""
    if matrix in pairs:
        problem = f"is of {matrix}, like {pairs[matrix].names[0]!r}"
        fail(f"tensor {pair.names[0]!r}", problem)
    for name, reach, most in zip(pair.names, pair.reach, (_MAX_BETWEEN, MAX_REACH), strict=True):
        if not reach <= most:
            fail(f"tensor {name!r}", "is so large that logits may be NaN with the adapter")
    pairs[matrix] = pair


def _not_adapted(name: str) -> str:
    kinds = "attention, MLP and output matrices"
    if "_exps." in name:
        return f"is of experts ({name}), which is not supported; supported: {kinds}"
    return f"is of {name}, which is not one of this model's {kinds}"


def _check_shapes(
    a: np.ndarray, b: np.ndarray, shape: tuple[int, ...], names: tuple[str, str], fail: Fail
) -> None:
    """Fails for matrices a and b whose product b @ a does not have `shape`, (n, k)."""
    n, k = shape
    if a.ndim != 2 or a.shape[0] < 1 or a.shape[1] != k:
        fail(f"tensor {names[0]!r}", f"has shape {a.shape}, expected (rank, {k})")
    if b.shape != (n, a.shape[0]):
        fail(f"tensor {names[1]!r}", f"has shape {b.shape}, expected {(n, a.shape[0])}")


def _check_types(weights: Weights, fail: Fail) -> None:
    for name, stored in weights.stored.items():
        if stored.dtype not in TYPES:
            known = ", ".join(TYPES)
            fail(f"tensor {name!r:.200}", f"has dtype {stored.dtype}; supported: {known}")


def _floats(tensor: QuantizedArray | np.ndarray) -> np.ndarray:
    return np.asarray(tensor.dequantize()) if isinstance(tensor, QuantizedArray) else tensor


def _failing(error: type[GGUFError] | type[CheckpointError], file: str) -> Fail:
    def fail(field: str, problem: str) -> NoReturn:
        raise error(file, field, problem)

    return fail


def adapter_specs(lora: Any) -> Iterator[tuple[str | os.PathLike[str], float]]:
    """Yields (path, scale) of each adapter in `lora`: a path, a pair, or a list of either."""
    for one in lora if isinstance(lora, list) else [lora]:
        if isinstance(one, str | os.PathLike):
            yield one, 1.0
        elif isinstance(one, tuple) and len(one) == 2 and isinstance(one[0], str | os.PathLike):
            yield one
        else:
            rule = "it must be a path, (path, scale), or a list of these"
            raise TypeError(f"lora is {one!r:.100}; {rule}")
