"""Selects the decoder of a quantized checkpoint by `quant_method` of config.json."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from ....support.json_fields import JSONFields
from ..safetensors import Weights
from . import awq, bitsandbytes, compressed_tensors, fp8, gptq, modelopt, mxfp4
from .base import PackedTensor

Find = Callable[[Weights, JSONFields], Iterator[PackedTensor]]

METHODS: Mapping[str, Find] = {
    "awq": awq.find,
    "bitsandbytes": bitsandbytes.find,
    "compressed-tensors": compressed_tensors.find,
    "fbgemm_fp8": fp8.find,
    "fp8": fp8.find,
    "gptq": gptq.find,
    "modelopt": modelopt.find,
    "mxfp4": mxfp4.find,
}
#: File of settings in folders whose config.json has none -> the object in it, and the method.
FILES: Mapping[str, tuple[str | None, str]] = {
    "hf_quant_config.json": ("quantization", "modelopt"),
    "quantize_config.json": (None, "gptq"),
    "quant_config.json": (None, "awq"),
}
_MAX_SETTINGS = 1 << 22  # bytes of these files


def method_of(settings: JSONFields) -> str:
    """Returns the quantization method; raises CheckpointError for one that is not supported."""
    algorithm = settings.string("quant_algo", None)  # only ModelOpt has it
    method = settings.string("quant_method", None if algorithm is None else "modelopt")
    if method is None and ("load_in_4bit" in settings or "load_in_8bit" in settings):
        method = "bitsandbytes"
    if method is None or method not in METHODS:
        found = "an object without quant_method" if method is None else repr(method)[:100]
        supported = ", ".join(METHODS)
        field = settings.prefix.removesuffix(".")
        where = JSONFields({}, settings.file)
        where.fail(field, f"is {found}, which is not supported; supported: {supported}")
    return method


def settings_of(fields: JSONFields) -> JSONFields | None:
    """Returns the settings of quantization in config.json; None if there are none.

    Early files of compressed-tensors have them at compression_config.
    """
    settings = fields.object("quantization_config")
    if settings is None and (early := fields.object("compression_config")) is not None:
        settings = _with_method(early, "compressed-tensors")
    text = fields.object("text_config")
    if settings is None and text is not None:
        settings = text.object("quantization_config")
    return settings


def settings_in(folder: Path, fields: JSONFields) -> JSONFields | None:
    """Returns the settings in config.json, or in another file of the folder."""
    settings = settings_of(fields)
    for name, (key, method) in FILES.items():
        if settings is None and (folder / name).exists():
            content = JSONFields.read(folder / name, _MAX_SETTINGS)
            inner = content if key is None else content.object(key)
            settings = None if inner is None else _with_method(inner, method)
    return settings


def _with_method(settings: JSONFields, method: str) -> JSONFields:
    """Returns settings with a default of quant_method."""
    values = {"quant_method": method, **settings.values}
    return JSONFields(values, settings.file, settings.prefix)


def packed_tensors(weights: Weights, settings: JSONFields | None) -> dict[str, PackedTensor]:
    """Returns the packed weights of a checkpoint by name, after checking all parts' shapes."""
    found: dict[str, PackedTensor] = {}
    if settings is None:
        return found
    for tensor in METHODS[method_of(settings)](weights, settings):
        if 0 in tensor.shape:
            weights.fail(tensor.parts[0], f"holds no weights: their shape is {tensor.shape}")
        if tensor.name in weights.stored and tensor.name not in tensor.parts:
            weights.fail(tensor.name, f"is present in addition to {tensor.parts[0]!r}")
        found[tensor.name] = tensor
    return found
