"""Reads Hugging Face checkpoints as GGUF metadata and tensors, one tensor at a time.

A checkpoint is a folder with config.json (read by `config_json`), tokenizer.json and related files
(`tokenizer_files`), and weights (`safetensors`). This module maps its tensors to GGUF names.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jax_q4k import CheckpointError, QuantizedArray
from jax_q4k.collecting import gc_throttled

from ...architectures.base import CheckpointClass
from ...architectures.tensor_tables import Tensor
from ...config import Config
from ...config.tensors import expected_tensors, table
from ...network.lazy import lazy_decoder
from ...runner.model import Model
from ...sharding.plan import Rules, plan_sharding
from ...support.json_fields import JSONFields
from ...support.warn import warn
from ..gguf import warn_of_tasks, with_tokenizer
from ..quantizing import recipes
from ..rows import Parts, in_rows
from . import (
    config_json,
    model_card,
    ranking,
    sentence_transformers,
    task_adapters,
    tensor_locations,
    tokenizer_files,
)
from .packed.methods import packed_tensors, settings_in
from .packed.weights import DecodedWeights
from .safetensors import TYPES, Weights
from .tensor_locations import Location

# Early files store the rope frequencies, which follow from rope_theta.
_BUFFER = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
# Multimodal classes: prefixes of the decoder in transformers 4 and 5, and of everything else.
_DECODER = re.compile(r"(language_model\.model|model\.language_model)\.")
_BESIDE_THE_DECODER = {
    "images": re.compile(r"(model\.)?(vision_tower|multi_modal_projector|visual|embed_vision)\."),
    "sound": re.compile(r"(model\.)?(audio_tower|embed_audio)\."),
}
_CACHE_SCALES = re.compile(
    r"model\.layers\.\d+\.self_attn\.(attn\.)?"
    r"(([kv]_proj\.)?([kvq]|kv|prob_output)_(scale|zero_point)|[kv]_proj\.output_scale)"
)
_KEYS_AND_VALUES = re.compile(r"model\.layers\.(\d+)\.self_attn\.(k_proj|v_proj|k_norm)\.")
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


class CheckpointSource:
    """Reader of a Hugging Face checkpoint, whose tensors are read one at a time.

    The constructor checks everything except the values of weights. As a context manager it closes
    the last file on exit.

    Attributes:
      name: folder or file, for error messages.
      config: configuration of the decoder.
      tokenizer: None if the folder has none.
      model_metadata: GGUF metadata without the tokenizer's keys.
      tensors: GGUF name -> shape, row-major.
      formats: GGUF name -> block format, of the weights that keep their blocks.
      packed: GGUF name -> type, of the weights that lose precision if they are quantized again.
      nbytes: GGUF name -> bytes in the checkpoint.
      tasks: name of each task that has an adapter -> prompt before its texts.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Reads and checks all descriptions of a checkpoint.

        path: a folder, or a .safetensors file in the same folder as config.json and tokenizer.json.

        Raises:
          jax_q4k.CheckpointError: a file is malformed or needs an unsupported feature, or files
            contradict each other.
          OSError: a file cannot be read.
        """
        self.name = os.fsdecode(path)
        location = Path(self.name)
        folder = location.parent if location.is_file() else location
        if not location.exists():
            raise FileNotFoundError(2, "No such file or directory", self.name)
        fields = JSONFields.read(folder / "config.json", config_json.MAX_CONFIG)
        self.description = config_json.describe(fields)
        vectors = sentence_transformers.settings(folder, self.description.config.kind)
        if vectors.dense is not None:
            self.description = _with_dense(self.description, vectors.dense[2])
        ranks = ranking.ranking_of(self.description, folder, fields)
        if ranks is not None:
            self.description = ranks.description
        self.config = self.description.config
        templates = {} if ranks is None else ranking.TEMPLATES
        self.tokenizer = tokenizer_files.load(folder, fields, self.config.vocab_size, templates)
        self.model_metadata: dict[str, Any] = vectors.metadata | self.description.metadata
        self.model_metadata |= tokenizer_files.sampling(folder, fields)
        self._task_settings = task_adapters.settings(folder, fields)
        self.tasks = self._task_settings.prompts
        weights = Weights(location)
        for path, name in zip((vectors.dense or ())[:2], ("dense_2", "dense_3"), strict=False):
            weights.add(Path(path) / "model.safetensors", f"{name}.")
        self._weights = DecodedWeights(
            weights, packed_tensors(weights, settings_in(folder, fields))
        )
        self._decoder = self._of_the_decoder()
        self._head = None if ranks is None else self._ranking_head(ranks, folder)
        tied = self.description.tied or self._lacks_a_head()
        self._tied = tied and self._tie()
        self._expected = expected_tensors(self.config)
        checkpoint = self.description.checkpoint
        candidates = tensor_locations.locations(self.config, checkpoint, self._decoder)
        self._locations = self._match(
            {name: location for name, location in candidates.items() if self._is_part(name)}
        )
        for name in [name for name in self._locations if self._is_left_out(name)]:
            del self._locations[name]
        self._made = self.description.rope_divisors | self._zeros()
        self.formats = self._formats()
        self.packed = self._labels()
        self._scales = {
            _scale_of(name): name for name, format in self.formats.items() if format == "NVFP4"
        }
        names = (*self._locations, *self._scales)
        self.tensors: dict[str, tuple[int, ...]] = {
            name: self._expected[name].shape for name in names
        } | {name: values.shape for name, values in self._made.items()}
        if self._head is not None:
            self.tensors[ranking.HEAD] = self._expected[ranking.HEAD].shape
        self.model_metadata |= model_card.metadata(folder, fields.values, self.tensors)
        self.nbytes = self._nbytes() | {name: v.nbytes for name, v in self._made.items()}
        if self._head is not None:
            self.nbytes[ranking.HEAD] = 4 * math.prod(self.tensors[ranking.HEAD])

    def __enter__(self) -> CheckpointSource:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file that was read last; `read` opens it again."""
        self._weights.close()

    @functools.cached_property
    def metadata(self) -> Mapping[str, Any]:
        """GGUF metadata, with `tokenizer.*` if the folder has a tokenizer.

        Warns of tokenizer settings that GGUF has no key for and most files omit, and of tensors
        that llama.cpp does not know. Warns of adapters of tasks, which a GGUF file does not hold.
        Raises CheckpointError if GGUF cannot express the tokenizer.
        """
        if self.tasks:
            warn_of_tasks(self.name, self.tasks)
        apart = self.description.checkpoint.without_zeros
        own = [name for name in self._locations if self._expected[name].entry.gguf in apart]
        if own:
            warn(f"{self.name}: llama.cpp has no tensor {own[0]} and refuses a file with it")
        return with_tokenizer(self.model_metadata, self.tokenizer)

    def read(self, name: str) -> np.ndarray | QuantizedArray:
        """Reads a tensor by GGUF name, with rows in GGUF order; norms and biases become float32.

        Raises CheckpointError if a value is NaN or infinite, or the file has changed.
        """
        if name in self._made:
            return self._made[name]
        if self._head is not None and name == ranking.HEAD:
            return self._head.read(self._weights)
        expected = self._expected[name]
        if name in self._scales:
            factors = map(self._weights.factor, self._locations[self._scales[name]].names)
            return np.broadcast_to(np.stack(list(factors)), expected.shape).copy()
        entry, is_bias = expected.entry, expected.is_bias
        location, format = self._locations[name], self.formats.get(name)
        values = tensor_locations.read(self._weights, location, expected.shape, format)
        if format is None and self._is_float32(name):
            values = values.astype(np.float32)
        offset = entry.is_norm and not is_bias and not location.plain
        if offset and self.config.kind.norm_offset:
            values += np.float32(self.config.kind.norm_offset)
        values = in_rope_order(values, entry, self.config, self.description.checkpoint)
        if format is None:
            return self._with_query_factor(name, values)
        return QuantizedArray.from_gguf_bytes(values.reshape(-1), format, expected.shape)

    def read_tasks(self) -> dict[str, dict[str, np.ndarray]]:
        """Reads the adapters of `tasks`, as `network.build.build` takes them."""
        located = self._weights, self._locations, self._expected
        return task_adapters.read(*located, self._task_settings)

    def parts(self, name: str, rows: int) -> Parts:
        """Reads a tensor, and yields functions that return at most `rows` rows of it."""
        yield from in_rows(self.read(name), rows)

    @property
    def types(self) -> dict[str, str]:
        """GGUF name -> ggml type name for what `read` returns.

        Tensors that no recipe quantizes have the type that recipes give them.
        """
        found = dict.fromkeys(self.tensors, "F32")
        for name, location in self._locations.items():
            if recipes.is_unquantized(name, self.tensors[name]):
                found[name] = recipes.unquantized_type(name)
            elif (format := self.formats.get(name)) is not None:
                found[name] = format
            elif not self._is_float32(name):
                found[name] = self._weights.stored[location.names[0]].dtype
        return found

    def _is_float32(self, name: str) -> bool:
        """Returns whether a tensor that does not keep its blocks becomes float32."""
        expected = self._expected[name]
        entry = expected.entry
        exact = entry.is_norm or entry.exact or query_factor(entry, self.config) is not None
        return len(expected.shape) == 1 or expected.is_bias or exact

    def _with_query_factor(self, name: str, values: np.ndarray) -> np.ndarray:
        """Multiplies a tensor by its `query_factor`; raises CheckpointError for an overflow."""
        entry = self._expected[name].entry
        if query_factor(entry, self.config) is None:
            return values
        with np.errstate(over="ignore"):
            values = with_query_factor(values, entry, self.config)
        if not np.isfinite(values).all():
            self._weights.fail(
                self._locations[name].names[0], "is so large that scaled queries are infinite"
            )
        return values

    def _formats(self) -> dict[str, str]:
        """Returns GGUF name -> block format, of the weights that keep the checkpoint's blocks.

        NVFP4 needs a scale tensor, which weights other than matrices do not have.
        """
        found = {}
        for name, location in self._locations.items():
            format = tensor_locations.block_format(self._weights, location)
            is_matrix = self._expected[name].suffix is None and self._expected[name].entry.is_matrix
            is_matrix &= query_factor(self._expected[name].entry, self.config) is None
            if format is not None and is_matrix and _scale_of(name) not in self._locations:
                found[name] = format
        return found

    def _labels(self) -> dict[str, str]:
        """Returns GGUF name -> type, of weights that are not original."""
        packed = self._weights.packed
        labels = {
            name: packed[location.names[0]].label
            for name, location in self._locations.items()
            if location.names[0] in packed
        }
        return {name: label for name, label in labels.items() if label is not None}

    def _zeros(self) -> dict[str, np.ndarray]:
        """Returns zeros for biases that GGUF files hold and this checkpoint lacks, float32."""
        return {
            name: np.zeros(tensor.shape, np.float32)
            for name, tensor in self._expected.items()
            if self._is_zero(name)
        }

    def _is_zero(self, name: str) -> bool:
        """Returns whether config.json says that the checkpoint lacks this bias."""
        tensor, lacking = self._expected[name], self.description.zero_biases
        return (tensor.entry.bias if tensor.is_bias else tensor.entry.gguf) in lacking

    def _nbytes(self) -> dict[str, int]:
        """Returns GGUF name -> bytes in the checkpoint.

        Divides the bytes of a checkpoint tensor that holds several GGUF tensors.
        """
        parts = collections.Counter(location.names for location in self._locations.values())
        sizes = dict.fromkeys(self._scales, 4)
        for name, location in self._locations.items():
            stored = sum(map(self._weights.nbytes, location.names))
            sizes[name] = stored // parts[location.names]
        return sizes

    def _of_the_decoder(self) -> dict[str, str]:
        """Returns the decoder's tensors: name in a text-only class -> name in the checkpoint.

        Warns of tensors that are not part of the decoder.
        """
        names = dict.fromkeys(self._weights.stored)
        if self.description.multimodal:
            for what, beside in _BESIDE_THE_DECODER.items():
                self._skip(names, [name for name in names if beside.match(name)], what)
        multimodal, checkpoint = self.description.multimodal, self.description.checkpoint
        headless = not multimodal and "embed_tokens.weight" in names  # a class without lm_head
        found: dict[str, str] = {}
        for name in names:
            in_a_decoder = name_in_decoder(name) if multimodal else name
            for pattern, replacement in checkpoint.tensor_names:
                in_a_decoder = re.sub(pattern, replacement, in_a_decoder)
            if checkpoint.unused and re.fullmatch(checkpoint.unused, in_a_decoder):
                continue
            if headless and name != _HEAD:
                in_a_decoder = f"model.{name}"
            if (earlier := found.setdefault(in_a_decoder, name)) != name:
                self._weights.fail(name, f"is the decoder's {in_a_decoder!r}, like {earlier!r}")
        layers = self.config.num_layers
        further = range(layers, layers + self.description.further_layers)
        unused = [
            name for name in found if (m := _LAYER.match(name)) and int(m.group(1)) in further
        ]
        if beginning := self.description.checkpoint.further_tensors:
            unused += [name for name in found if name.removeprefix("model.").startswith(beginning)]
        self._skip(found, unused, "further tokens")
        scales = [name for name in found if _CACHE_SCALES.fullmatch(name)]
        self._skip(found, scales, "scales of FP8 caches")
        shared = [
            name
            for name in found
            if (m := _KEYS_AND_VALUES.match(name)) and self._shares(int(m.group(1)))
        ]
        self._skip(found, shared, "keys and values of layers that reuse another layer's")
        return found

    def _ranking_head(self, ranks: ranking.Ranking, folder: Path) -> ranking.Head:
        """Returns the location of a reranker's head; removes `score` from the decoder's tensors."""
        if ranks.rows is None:
            tied = self.description.tied or "embed_tokens.weight" in self._weights.stored
            name = _EMBEDDING if tied and _HEAD not in self._decoder else _HEAD
            shape = self.config.vocab_size, self.config.hidden_size
            rows = ranks.answers(self.tokenizer, folder)
        else:
            name, rows = ranking.SCORE, ranks.rows
            shape = len(rows) - rows.count(None), self.config.hidden_size
        head = self._found(name, shape)
        self._check_types([head])
        self._decoder.pop(ranking.SCORE, None)
        return ranking.Head(head, rows)

    def _lacks_a_head(self) -> bool:
        """Returns whether the class has no lm_head, as those for embeddings; warns if so."""
        headless = "embed_tokens.weight" in self._weights.stored or self._head is not None
        lacks = headless and _HEAD not in self._decoder
        if lacks:
            warn(f"{self.name}: has no {_HEAD}, and generates with its embedding instead")
        return lacks

    def _tie(self) -> bool:
        """Returns whether the embedding is the output layer of a model that config.json calls tied.

        As in transformers 5, an lm_head with other values than the embedding is used, and an
        lm_head without an embedding serves as both.
        """
        if _HEAD not in self._decoder:
            return True
        if _EMBEDDING not in self._decoder:
            self._decoder[_EMBEDDING] = self._decoder.pop(_HEAD)
            return True
        head, embedding = self._decoder[_HEAD], self._decoder[_EMBEDDING]
        if self._weights.equal(head, embedding):
            del self._decoder[_HEAD]
            return True
        message = f"tie_word_embeddings is set, but {head!r} differs from {embedding!r} and is used"
        warn(f"{self.name}: {message}")
        return False

    def _shares(self, layer: int) -> bool:
        """Returns whether a layer shares the keys and values of an earlier layer."""
        return layer < self.config.num_layers and self.config.kv_layer_of(layer) != layer

    @staticmethod
    def _skip(names: dict[str, Any], unused: list[str], what: str) -> None:
        if unused:
            message = "tensors are skipped, which text generation does not use"
            warn(f"{len(unused)} {message}: {what}")
        for name in unused:
            del names[name]

    def _match(self, locations: dict[str, Location]) -> dict[str, Location]:
        """Returns the locations with names as in this checkpoint.

        Raises CheckpointError for tensors that are missing, not part of the model, or of a wrong
        shape or type.
        """
        matched: dict[str, Location] = {}
        known: set[str] = set()
        for name, unresolved in locations.items():
            first = self._decoder.get(unresolved.names[0], "")
            found = self._weights.stored.get(first)
            packed = self._weights.packed.get(first)
            in_blocks = packed is not None and packed.format is not None
            shape = () if found is None else found.shape
            location = unresolved.resolved(shape, in_blocks)
            names = tuple(self._found(part, location.shape) for part in location.names)
            matched[name] = dataclasses.replace(location, names=names)
            self._check_types(names)
            known.update(names)
        for in_a_decoder, stored_name in self._decoder.items():
            if stored_name in known or _BUFFER.fullmatch(in_a_decoder):
                continue
            if not self._is_neutral_bias(stored_name):
                architecture = self.config.architecture
                self._weights.fail(
                    stored_name,
                    f"is not part of a {architecture} model as config.json describes it",
                )
        return matched

    def _is_neutral_bias(self, stored_name: str) -> bool:
        """Returns whether a tensor is a bias of zeros that quantization added to a module."""
        module, _, what = stored_name.rpartition(".")
        return (
            what == "bias"
            and f"{module}.weight" in self._weights.packed
            and self._weights.stored[stored_name].dtype in TYPES
            and not self._weights.read(stored_name).any()
        )

    def _found(self, in_a_decoder: str, shape: tuple[int, ...]) -> str:
        """Returns a tensor's name in the checkpoint; raises CheckpointError for another shape."""
        if in_a_decoder not in self._decoder:
            problem = f"is missing, expected with shape {shape}"
            if in_a_decoder == _HEAD:
                problem += ", because config.json's tie_word_embeddings is false"
            raise CheckpointError(self.name, f"tensor {in_a_decoder!r}", problem)
        name = self._decoder[in_a_decoder]
        if (found := self._weights.stored[name].shape) != shape:
            self._check_types([name])
            self._weights.fail(name, f"has shape {found}, expected {shape}")
        return name

    def _check_types(self, names: Sequence[str]) -> None:
        """Raises CheckpointError for unsupported types, and for experts of different types."""
        first = self._weights.stored[names[0]].dtype
        for name in names:
            dtype = self._weights.stored[name].dtype
            if dtype not in TYPES:
                known = ", ".join(TYPES)
                self._weights.fail(
                    name, f"has dtype {dtype}, which is not supported; supported: {known}"
                )
            if dtype != first:
                self._weights.fail(name, f"has dtype {dtype}, but {names[0]!r} has {first}")

    def _is_left_out(self, name: str) -> bool:
        """Returns whether a tensor has only zeros and `CheckpointClass.without_zeros` names it."""
        if self._expected[name].entry.gguf not in self.description.checkpoint.without_zeros:
            return False
        return not self._weights.read(self._locations[name].names[0]).any()

    @functools.cached_property
    def _holds_together(self) -> bool:
        """Whether the checkpoint holds a tensor of `CheckpointClass.together`."""
        together = self.description.checkpoint.together
        names = {
            prefix + f"{tensor.checkpoint}.weight"
            for tensor, _, prefix, _ in table(self.config)
            if tensor.gguf in together
        }
        return not names.isdisjoint(self._decoder)

    def _is_part(self, name: str) -> bool:
        """Returns whether config.json implies that the checkpoint holds this tensor."""
        entry = self._expected[name].entry
        if name == "output.weight":
            return not self._tied
        weight = name.removesuffix(".bias" if self._expected[name].is_bias else ".weight")
        if entry.gguf in self.description.checkpoint.together:
            return self._holds_together
        if self._is_zero(name) or weight in self.description.lacking:
            return False
        if self._expected[name].is_bias:
            return entry.bias in (*self.config.kind.biases, *self.description.biases)
        return entry.required or entry.gguf in self.description.tensors


def _with_dense(description: config_json.Description, size: int) -> config_json.Description:
    """Returns the description with dense layers after pooling, of this inner size."""
    config = dataclasses.replace(description.config, dense_size=size)
    return dataclasses.replace(
        description,
        config=config,
        metadata=description.metadata | config.to_metadata(),
        tensors=(*description.tensors, "dense_2", "dense_3"),
    )


@gc_throttled()
def from_pretrained(
    path: str | os.PathLike[str],
    *,
    progress: Callable[[int, int], object] | None = None,
    mesh: Mesh | None = None,
    rules: Rules | None = None,
) -> Model:
    """Loads a Hugging Face checkpoint from a local folder; nothing is downloaded.

    Weights keep their type (float32, float16 or bfloat16); float64, norms and biases become
    float32. Quantized weights are decoded to the type of their scales, but MXFP4, and NVFP4 with
    rows of a multiple of 64 weights, keep their blocks.

    Args:
      path: a folder written by `save_pretrained` of transformers, or one .safetensors file in it.
      progress: called with (bytes done, total bytes) while tensors are read.
      mesh, rules: sharding over devices, as in `load`.

    Returns:
      The model; its tokenizer is None if the folder has none.

    Raises:
      jax_q4k.CheckpointError: a file is malformed, or needs an unsupported feature.
      OSError: a file cannot be read.
    """
    with CheckpointSource(path) as source:
        total, done, tensors = sum(source.nbytes.values()), 0, {}
        described = {
            name: _Described(shape, _Type(source.formats.get(name)))
            for name, shape in source.tensors.items()
        }
        placement = None if mesh is None else plan_sharding(source.config, described, mesh, rules)
        for name in source.tensors:
            if progress is not None:
                progress(done, total)
            sharding = None if placement is None else placement.tensors[name]
            tensors[name] = jax.device_put(source.read(name), sharding)
            done += source.nbytes[name]
        if progress is not None:
            progress(done, total)
        adapters, tasks = {}, source.tasks
        if tasks and mesh is not None:
            warn(f"{source.name}: adapters of tasks need a model on one device and are not read")
            tasks = {}
        elif tasks:
            adapters = jax.device_put(source.read_tasks())
        decoder = lazy_decoder(source.config, tensors, adapters)
        return Model(decoder, source.tokenizer, source.model_metadata, placement, tasks)


class _Type(NamedTuple):
    """Type of a tensor as `plan_sharding` reads it: its block format, or None."""

    name: str | None


class _Described(NamedTuple):
    """Description of a tensor as `plan_sharding` reads it."""

    shape: tuple[int, ...]
    type: _Type


def _scale_of(name: str) -> str:
    """Returns the name of the scale of a weight."""
    return f"{name.rpartition('.')[0]}.scale"


def name_in_decoder(name: str) -> str:
    """Converts a tensor's or module's name in a multimodal class to that in a text-only class."""
    return _DECODER.sub("model.", name).removeprefix("language_model.")


def in_rope_order(
    rows: np.ndarray, entry: Tensor, config: Config, checkpoint: CheckpointClass
) -> np.ndarray:
    """Converts a tensor's rows from the order of a checkpoint's rope to that of the decoder's.

    rows: (n, ...), of a matrix, its bias, or the second matrix of its adapter. Returns the same
    shape; rows that rope does not rotate stay.
    """
    stays = config.checkpoint_interleaved
    stays = checkpoint.interleaved_rope if stays is None else stays
    if entry.rotated is None or not config.interleaved_rope or stays:
        return rows
    last = None if config.latent is None else config.rope_dim
    return interleaved(rows, getattr(config, entry.rotated), last)


def query_factor(entry: Tensor, config: Config) -> np.ndarray | None:
    """Returns the factor of a GGUF tensor relative to the checkpoint's, which scales queries.

    It is that of the norm of queries, or of the matrix and bias of models without the norm.
    float32, () or, where only rotated rows have it (MLA), (n, 1); None means 1.
    """
    normalized = any(tensor.gguf == "attn_q_norm" for tensor in config.kind.attention)
    scaled = ("attn_q_norm",) if normalized else ("attn_q", "attn_q_b")
    if config.checkpoint_query_factor == 1 or entry.gguf not in scaled:
        return None
    if config.latent is None:
        return np.asarray(config.checkpoint_query_factor, np.float32)
    of_head = np.ones(config.head_dim, np.float32)
    of_head[-config.rope_dim :] = config.checkpoint_query_factor
    return np.tile(of_head, config.num_heads)[:, None]


def with_query_factor(rows: np.ndarray, entry: Tensor, config: Config) -> np.ndarray:
    """Returns rows of the checkpoint's tensor, or of its adapter's second matrix, as GGUF's."""
    factor = query_factor(entry, config)
    return rows if factor is None else rows * factor


def interleaved(rows: np.ndarray, heads: int, last: int | None = None) -> np.ndarray:
    """Reorders rows of a query or key projection, or of its bias, for interleaved rope.

    Interleaved rope rotates dimensions (2i, 2i + 1) of a head, the checkpoint's (i, i + head_dim /
    2). rows: (heads * head_dim, ...). last: number of rotated dimensions, which are a head's last;
    None means all. Returns the same shape, contiguous.
    """
    of_heads = rows.reshape(heads, -1, *rows.shape[1:])
    start = 0 if last is None else of_heads.shape[1] - last
    order = np.arange(of_heads.shape[1])
    order[start:] = order[start:].reshape(2, -1).T.reshape(-1)
    return of_heads[:, order].reshape(rows.shape)
