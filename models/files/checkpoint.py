"""Hugging Face checkpoints, as GGUF metadata and tensors that are read one at a time.

A checkpoint is a folder: config.json (`config_json`), tokenizer.json and its relatives
(`tokenizer_files`) and weights (`safetensors`). This file gives its tensors GGUF's names.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from jax_q4k import CheckpointError

from .. import tokenizer
from ..json_fields import JSONFields
from ..model import Model
from ..place import Rules, place
from ..tensors import expected_tensors
from ..unbuilt import unbuilt
from . import config_json, tokenizer_files
from .safetensors import TYPES, Weights

_ROPE = "rope_freqs.weight"
# Early files store what rope_theta says.
_BUFFER = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")


# Of classes that take images, too: their decoder's prefixes, of transformers 4 and 5, and the rest.
_DECODER = re.compile(r"(language_model\.model|model\.language_model)\.")
_NO_DECODER = re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\.")


class CheckpointSource:
    """A Hugging Face checkpoint whose tensors are read one at a time.

    All but the values of its weights is checked at once. A context manager, whose end closes the
    file that was read last.

    Attributes:
      name: the folder or file, for errors.
      config: the decoder's dimensions.
      metadata: GGUF's keys, `tokenizer.*` included if the folder holds a tokenizer.
      tensors: GGUF's names -> shapes, row-major.
      nbytes: GGUF's names -> bytes in the checkpoint.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """path: a folder, or a .safetensors file that lies beside config.json and tokenizer.json.

        Raises:
          jax_q4k.CheckpointError: a file is malformed or asks for an unsupported feature, or the
            files do not fit together.
          OSError: a file cannot be read.
        """
        self.name = os.fsdecode(path)
        given = Path(self.name)
        folder = given.parent if given.is_file() else given
        if not given.exists():
            raise FileNotFoundError(2, "No such file or directory", self.name)
        fields = JSONFields.read(folder / "config.json", config_json.MAX_CONFIG)
        self.description = config_json.describe(fields)
        self.config = self.description.config
        # A folder's name need not be Unicode.
        folder_name = folder.resolve().name.encode(errors="replace").decode()
        title = {"general.type": "model", "general.name": folder_name or "model"}
        words = tokenizer_files.metadata(folder, fields, self.config.vocab_size)
        if needed := words.get("general.name"):  # the folder may be called anything
            found = title["general.name"]
            words["general.name"] = found if needed in found.lower() else f"{found} ({needed})"
        self.metadata = self.description.metadata | title | words
        self._weights = Weights(given)
        self._decoder = self._of_the_decoder()
        self._expected = expected_tensors(self.config)
        self._stored_names = self._match()
        self.tensors: dict[str, tuple[int, ...]] = {
            name: self._weights.stored[stored].shape for name, stored in self._stored_names.items()
        }
        self.nbytes = {
            name: self._weights.stored[stored].nbytes for name, stored in self._stored_names.items()
        }
        if self.description.rope_divisors is not None:
            self.tensors[_ROPE] = self.description.rope_divisors.shape
            self.nbytes[_ROPE] = self.description.rope_divisors.nbytes

    def __enter__(self) -> CheckpointSource:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file that was read last; `read` opens it again."""
        self._weights.close()

    @property
    def has_tokenizer(self) -> bool:
        """True if the folder holds a tokenizer."""
        return tokenizer.has_tokenizer(self.metadata)

    def read(self, name: str) -> np.ndarray:
        """A tensor by GGUF's name, its rows in GGUF's order; norms and biases become float32.

        Raises CheckpointError if a value is NaN or infinite, or the file has changed.
        """
        if name == _ROPE and self.description.rope_divisors is not None:
            return self.description.rope_divisors
        values = self._weights.read(self._stored_names[name])
        values = values.astype(np.float32) if values.ndim == 1 else values
        entry = self._expected[name].entry
        if values.ndim == 1 and not self._expected[name].is_bias and self.config.kind.norm_offset:
            values += np.float32(self.config.kind.norm_offset)
        if self.config.interleaved_rope and entry.rotated is not None:
            return interleaved(values, getattr(self.config, entry.rotated))
        return values

    def _of_the_decoder(self) -> dict[str, str]:
        """A decoder's names of its tensors -> the checkpoint's; warns of tensors beside them."""
        stored = self._weights.stored
        if not self.description.multimodal:
            return {name: name for name in stored}
        names = [name for name in stored if not _NO_DECODER.match(name)]
        if others := len(stored) - len(names):
            message = f"{others} tensors are skipped, which generating text does not use: images"
            warnings.warn(message, stacklevel=3)
        return {
            _DECODER.sub("model.", name).removeprefix("language_model."): name for name in names
        }

    def _match(self) -> dict[str, str]:
        """GGUF's names -> the checkpoint's, of all tensors but the rope divisors.

        Refuses a tensor that is missing, of another shape or type, or no part of the model.
        """
        names: dict[str, str] = {}
        for name, (shape, *_) in self._expected.items():
            if not self._is_part(name):
                continue
            in_a_decoder = str(self._expected[name].checkpoint)
            if in_a_decoder not in self._decoder:
                problem = f"is missing, expected with shape {shape}"
                raise CheckpointError(self.name, f"tensor {in_a_decoder!r}", problem)
            names[name] = stored_name = self._decoder[in_a_decoder]
            stored = self._weights.stored[stored_name]
            if stored.dtype not in TYPES:
                supported = f"supported are {', '.join(TYPES)}"
                problem = f"has dtype {stored.dtype}, which is not supported; {supported}"
                raise CheckpointError(str(stored.file), f"tensor {stored_name!r}", problem)
            if stored.shape != shape:
                problem = f"has shape {stored.shape}, expected {shape}"
                raise CheckpointError(str(stored.file), f"tensor {stored_name!r}", problem)
        known = set(names.values())
        for in_a_decoder, stored_name in self._decoder.items():
            # The embedding is taken in its place.
            tied = self.description.tied and in_a_decoder == "lm_head.weight"
            if stored_name not in known and not tied and not _BUFFER.fullmatch(in_a_decoder):
                architecture, file = (
                    self.config.architecture,
                    self._weights.stored[stored_name].file,
                )
                problem = f"is not part of a {architecture} model as config.json describes it"
                raise CheckpointError(str(file), f"tensor {stored_name!r}", problem)
        return names

    def _is_part(self, name: str) -> bool:
        """True if config.json says that the checkpoint holds this tensor."""
        entry = self._expected[name].entry
        if entry.checkpoint is None:
            return False
        if name == "output.weight":
            return not self.description.tied
        if not self._expected[name].is_bias:
            return True
        return entry.bias in (*self.config.kind.biases, *self.description.biases)


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
      path: a folder as `save_pretrained` of the transformers library writes it, or one .safetensors
        file in it.
      progress: called with (bytes done, bytes in all) while tensors are read.
      mesh, rules: devices that the model is split over, and how, as `load` takes them.

    Returns:
      The model; its tokenizer is None if the folder holds none.

    Raises:
      jax_q4k.CheckpointError: a file is malformed, or asks for an unsupported feature.
      OSError: it cannot be read.
    """
    with CheckpointSource(path) as source:
        total, done, tensors = sum(source.nbytes.values()), 0, {}
        shapes = {name: jax.ShapeDtypeStruct(s, np.float32) for name, s in source.tensors.items()}
        placement = None if mesh is None else place(source.config, shapes, mesh, rules)
        for name in source.tensors:
            if progress is not None:
                progress(done, total)
            sharding = None if placement is None else placement.tensors[name]
            tensors[name] = jax.device_put(source.read(name), sharding)
            done += source.nbytes[name]
        if progress is not None:
            progress(done, total)
        decoder, loaded = unbuilt(source.config, tensors), None
        if source.has_tokenizer:
            loaded = tokenizer.from_metadata(source.metadata, source.name)
        return Model(decoder, loaded, source.metadata, placement)


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query or key projection, or of its bias, reordered for interleaved rope.

    Interleaved rope rotates dimensions (2i, 2i + 1) of a head, the checkpoint's (i, i + head_dim /
    2). rows: (heads * head_dim, ...) -> the same shape, contiguous.
    """
    halves = rows.reshape(heads, 2, -1, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)
