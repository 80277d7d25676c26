"""Reads Hugging Face checkpoints as GGUF metadata and tensors, one tensor at a time.

A checkpoint is a folder with config.json (read by `config_json`), tokenizer.json and related files
(`tokenizer_files`), and weights (`safetensors`). This module maps its tensors to GGUF names.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np
from jax.sharding import Mesh

from jax_q4k import CheckpointError, QuantizedArray
from jax_q4k.collecting import gc_throttled

from ...config.tensors import expected_tensors
from ...network.lazy import lazy_decoder
from ...runner.model import Model
from ...sharding.plan import Rules, plan_sharding
from ...support.json_fields import JSONFields
from ...support.warn import warn
from ..gguf import with_tokenizer
from . import config_json, sentence_transformers, tensor_locations, tokenizer_files
from .safetensors import PACKED, TYPES, Weights
from .tensor_locations import Location

# Early files store the rope frequencies, which follow from rope_theta.
_BUFFER = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
# Multimodal classes: prefixes of the decoder in transformers 4 and 5, and of everything else.
_DECODER = re.compile(r"(language_model\.model|model\.language_model)\.")
_BESIDE_THE_DECODER = {
    "images": re.compile(r"(model\.)?(vision_tower|multi_modal_projector|visual|embed_vision)\."),
    "sound": re.compile(r"(model\.)?(audio_tower|embed_audio)\."),
}
_CACHE_SCALES = re.compile(r"model\.layers\.\d+\.self_attn\.([kv]_proj\.)?[kv]_scale")
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
      nbytes: GGUF name -> bytes in the checkpoint.
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
        self.config = self.description.config
        # A folder's name need not be Unicode.
        folder_name = folder.resolve().name.encode(errors="replace").decode()
        title = {"general.type": "model", "general.name": folder_name or "model"}
        self.tokenizer = tokenizer_files.load(folder, fields, self.config.vocab_size)
        self.model_metadata: dict[str, Any] = self.description.metadata | title | vectors.metadata
        self.model_metadata |= tokenizer_files.sampling(folder, fields)
        self._weights = Weights(location)
        for path, name in zip((vectors.dense or ())[:2], ("dense_2", "dense_3"), strict=False):
            self._weights.add(Path(path) / "model.safetensors", f"{name}.")
        self._decoder = self._of_the_decoder()
        self._tied = self.description.tied and self._tie()
        self._expected = expected_tensors(self.config)
        checkpoint, packed = self.description.checkpoint, self.description.packed
        candidates = tensor_locations.locations(self.config, checkpoint, packed, self._decoder)
        self._locations = self._match(
            {name: location for name, location in candidates.items() if self._is_part(name)}
        )
        divisors = self.description.rope_divisors
        self.packed: dict[str, str] = {}  # empty: MXFP4 experts count as original weights
        self.tensors: dict[str, tuple[int, ...]] = {
            name: self._expected[name].shape for name in self._locations
        } | {name: values.shape for name, values in divisors.items()}
        self.nbytes = self._nbytes() | {name: values.nbytes for name, values in divisors.items()}

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

        Warns of tokenizer settings that GGUF has no key for and most files omit. Raises
        CheckpointError if GGUF cannot express the tokenizer.
        """
        return with_tokenizer(self.model_metadata, self.tokenizer)

    def read(self, name: str) -> np.ndarray | QuantizedArray:
        """Reads a tensor by GGUF name, with rows in GGUF order; norms and biases become float32.

        Raises CheckpointError if a value is NaN or infinite, or the file has changed.
        """
        if name in self.description.rope_divisors:
            return self.description.rope_divisors[name]
        expected = self._expected[name]
        entry, is_bias = expected.entry, expected.is_bias
        values = tensor_locations.read(self._weights, self._locations[name], expected.shape)
        if isinstance(values, QuantizedArray):
            return values
        if values.ndim == 1 or is_bias or entry.is_norm or entry.exact:
            values = values.astype(np.float32)
        offset = entry.is_norm and not is_bias and not self._locations[name].plain
        if offset and self.config.kind.norm_offset:
            values += np.float32(self.config.kind.norm_offset)
        stays = not self.config.interleaved_rope or self.description.checkpoint.interleaved_rope
        if entry.rotated is not None and not stays:
            return interleaved(values, getattr(self.config, entry.rotated))
        return values

    def _nbytes(self) -> dict[str, int]:
        """Returns GGUF name -> bytes in the checkpoint.

        Divides the bytes of a checkpoint tensor that holds several GGUF tensors.
        """
        parts = collections.Counter(location.names for location in self._locations.values())
        sizes = {}
        for name, location in self._locations.items():
            stored = (self._weights.stored[part] for part in (*location.names, *location.scales))
            sizes[name] = sum(tensor.nbytes for tensor in stored) // parts[location.names]
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
                self._fail(name, f"is the decoder's {in_a_decoder!r}, like {earlier!r}")
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
        matched, known = {}, set()
        for name, unresolved in locations.items():
            first = self._decoder.get(unresolved.names[0], "")
            found = self._weights.stored.get(first)
            location = unresolved.resolved(() if found is None else found.shape)
            names = tuple(self._found(part, location.shape) for part in location.names)
            matched[name] = dataclasses.replace(location, names=names)
            for part in location.scales:
                self._found(part, location.shape[:-1])
            stored = [*names, *matched[name].scales]
            self._check_types(stored, location.packed)
            known.update(stored)
        for in_a_decoder, stored_name in self._decoder.items():
            if stored_name not in known and not _BUFFER.fullmatch(in_a_decoder):
                architecture = self.config.architecture
                self._fail(
                    stored_name,
                    f"is not part of a {architecture} model as config.json describes it",
                )
        return matched

    def _found(self, in_a_decoder: str, shape: tuple[int, ...]) -> str:
        """Returns a tensor's name in the checkpoint; raises CheckpointError for another shape."""
        if in_a_decoder not in self._decoder:
            problem = f"is missing, expected with shape {shape}"
            if in_a_decoder == _HEAD:
                problem += ", because config.json's tie_word_embeddings is false"
            raise CheckpointError(self.name, f"tensor {in_a_decoder!r}", problem)
        name = self._decoder[in_a_decoder]
        if (found := self._weights.stored[name].shape) != shape:
            self._check_types([name], packed=self._weights.stored[name].dtype == PACKED)
            self._fail(name, f"has shape {found}, expected {shape}")
        return name

    def _check_types(self, names: list[str], packed: bool) -> None:
        """Raises CheckpointError for unsupported types, and for experts of different types."""
        supported = (PACKED,) if packed else tuple(TYPES)
        first = self._weights.stored[names[0]].dtype
        for name in names:
            dtype = self._weights.stored[name].dtype
            if dtype not in supported:
                known = ", ".join(supported)
                self._fail(name, f"has dtype {dtype}, which is not supported; supported: {known}")
            if dtype != first:
                self._fail(name, f"has dtype {dtype}, but {names[0]!r} has {first}")

    def _fail(self, stored_name: str, problem: str) -> NoReturn:
        file = str(self._weights.stored[stored_name].file)
        raise CheckpointError(file, f"tensor {stored_name!r}", problem)

    def _is_part(self, name: str) -> bool:
        """Returns whether config.json implies that the checkpoint holds this tensor."""
        entry = self._expected[name].entry
        if name == "output.weight":
            return not self._tied
        if self._expected[name].is_bias:
            return entry.bias in (*self.config.kind.biases, *self.description.biases)
        if name.removesuffix(".weight") in self.description.lacking:
            return False
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

    Weights keep their type (float32, float16 or bfloat16); norms and biases become float32.

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
        shapes = {name: jax.ShapeDtypeStruct(s, np.float32) for name, s in source.tensors.items()}
        placement = None if mesh is None else plan_sharding(source.config, shapes, mesh, rules)
        for name in source.tensors:
            if progress is not None:
                progress(done, total)
            sharding = None if placement is None else placement.tensors[name]
            tensors[name] = jax.device_put(source.read(name), sharding)
            done += source.nbytes[name]
        if progress is not None:
            progress(done, total)
        decoder = lazy_decoder(source.config, tensors)
        return Model(decoder, source.tokenizer, source.model_metadata, placement)


def name_in_decoder(name: str) -> str:
    """Converts a tensor's or module's name in a multimodal class to that in a text-only class."""
    return _DECODER.sub("model.", name).removeprefix("language_model.")


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Reorders rows of a query or key projection, or of its bias, for interleaved rope.

    Interleaved rope rotates dimensions (2i, 2i + 1) of a head, the checkpoint's (i, i + head_dim /
    2). rows: (heads * head_dim, ...). Returns the same shape, contiguous.
    """
    halves = rows.reshape(heads, 2, -1, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)
