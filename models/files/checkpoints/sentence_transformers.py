"""Reads pooling and normalization from a sentence-transformers folder.

modules.json lists the modules after the decoder: a pooling, whose folder has a config.json, and
possibly a normalization. Unsupported modules or settings are stored as a reason: the checkpoint can
still generate text, but `models.embed` rejects it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from ...architectures.base import Architecture
from ...config.pooling import NORMALIZE, UNSUPPORTED, metadata_of
from ...support.json_fields import JSONFields, read
from .config_json import MAX_CONFIG

#: Flag in a pooling's config.json -> pooling.
_MODES = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
_NAMES = {"mean": "mean", "cls": "cls", "lasttoken": "last"}  # newer files: one key, pooling_mode
_USUAL_FOLDER = "1_Pooling"


class _UnsupportedError(Exception):
    """The folder's embeddings cannot be computed; the message gives the reason."""


class Settings(NamedTuple):
    """A folder's settings for embeddings.

    Attributes:
      metadata: empty if it has none.
      dense: folders of the two dense layers after pooling, and the output size of the first; None
        without such layers.
    """

    metadata: dict[str, Any]
    dense: tuple[Path, Path, int] | None = None


def settings(folder: Path, kind: Architecture) -> Settings:
    """Returns the folder's settings for embeddings; raises CheckpointError for a malformed file."""
    try:
        return _settings(folder, kind)
    except _UnsupportedError as reason:
        return Settings({UNSUPPORTED: str(reason)})


def _settings(folder: Path, kind_of_model: Architecture) -> Settings:
    pooling, normalize = None, False
    dense: list[Path] = []
    takes_dense = any(tensor.gguf == "dense_2" for tensor in kind_of_model.output)
    for kind, path in _modules(folder):
        if kind == "Transformer":
            continue
        if kind == "Normalize":
            normalize = True
        elif kind == "Pooling" and pooling is None and not normalize:
            pooling = _pooling(folder / path / "config.json")
        elif kind == "Dense" and takes_dense and pooling is not None and len(dense) < 2:
            dense.append(folder / path)
        else:
            known = "Transformer, Pooling, Normalize"
            _refuse(
                folder / "modules.json", f"module {kind[:100]!r} here", f"expected one of {known}"
            )
    _check_texts(folder)
    sizes = [_dense_size(path / "config.json") for path in dense]
    if len(dense) == 1:
        _refuse(folder / "modules.json", "one module 'Dense'", "expected two or none")
    found: dict[str, Any] = {} if pooling is None else metadata_of(kind_of_model.name, pooling)
    found |= {NORMALIZE: True} if normalize else {}
    return Settings(found, (dense[0], dense[1], sizes[0]) if dense else None)


def _modules(folder: Path) -> list[tuple[str, Path]]:
    """Returns the kind and folder of each module; a folder must be inside the checkpoint."""
    file = folder / "modules.json"
    if not file.exists():
        usual = Path(_USUAL_FOLDER)
        return [("Pooling", usual)] if (folder / usual / "config.json").exists() else []
    modules = []
    entries = JSONFields({"modules": read(file, MAX_CONFIG)}, str(file)).objects("modules")
    for entry in entries:
        path = Path(entry.string("path", ""))
        if path.is_absolute() or ".." in path.parts:
            entry.fail("path", f"is {str(path)[:100]!r}, expected a folder in the checkpoint's")
        modules.append((entry.string("type").rpartition(".")[2], path))
    return modules


def _dense_size(file: Path) -> int:
    """Returns the output size of a dense layer without bias and activation."""
    config = JSONFields.read(file, MAX_CONFIG)
    if config.boolean("bias", True):
        _refuse(file, "bias=true", "expected a layer without")
    activation = config.string("activation_function", "Identity").rpartition(".")[2]
    if activation != "Identity":
        _refuse(file, f"activation_function {activation[:50]!r}", "expected Identity")
    return config.integer("out_features", least=1, most=1 << 24)


def _pooling(file: Path) -> str:
    config = JSONFields.read(file, MAX_CONFIG)
    modes = [name for flag, name in _MODES.items() if config.boolean(flag, False)]
    if (name := config.string("pooling_mode", None)) is not None:
        modes = [_NAMES.get(name, name)]
    if len(modes) != 1 or modes[0] not in _NAMES.values():
        shown = " and ".join(modes)[:200] or "nothing"
        _refuse(file, f"pooling of {shown}", "expected one of mean, cls and lasttoken")
    if not config.boolean("include_prompt", True):
        _refuse(file, "include_prompt=false", "here, nothing marks the prompt's tokens")
    return modes[0]


def _check_texts(folder: Path) -> None:
    """Raises `_UnsupportedError` for settings that change texts before they are tokenized."""
    file = folder / "config_sentence_transformers.json"
    if file.exists():
        name = JSONFields.read(file, MAX_CONFIG).string("default_prompt_name", None)
        if name is not None:
            rule = "write the prompt before texts"
            _refuse(file, f"default_prompt_name={name[:100]!r}", rule)
    file = folder / "sentence_bert_config.json"
    if file.exists() and JSONFields.read(file, MAX_CONFIG).boolean("do_lower_case", False):
        _refuse(file, "do_lower_case=true", "give texts in lower case")


def _refuse(file: Path, what: str, rule: str) -> NoReturn:
    raise _UnsupportedError(f"{file.parent.name}/{file.name}: {what} is not supported: {rule}")
