"""Recognizes GGUF files without a language model: projectors, adapters, imatrices, vocabularies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: `general.type` -> what the file is, and what to do with it.
_TYPES = {
    "adapter": "is a LoRA adapter; load its base model, with the adapter as lora= or --lora",
    "imatrix": "is an importance matrix; pass it to `jax-q4k quantize --imatrix`",
    "mmproj": "is the projector of a multimodal model; load the language model's own file, which "
    "reads text alone",
}

_EMBEDS = "is an encoder of a kind that is not supported"
_DIFFUSES = "is a diffusion model, which does not generate text token by token"

#: `general.architecture` -> likewise.
_ARCHITECTURES = {
    "clip": _TYPES["mmproj"],
    "controlvector": "is a control vector, which is not supported",
    "imatrix": _TYPES["imatrix"],
    "wavtokenizer-dec": "is the decoder of a text-to-speech model, which is not supported",
    "t5": "is an encoder-decoder model, which is not supported",
    "t5encoder": _EMBEDS,
    **dict.fromkeys(
        (
            "eurobert",
            "llama-embed",
            "neo-bert",
        ),
        _EMBEDS,
    ),
    **dict.fromkeys(
        (
            "aura",
            "cosmos",
            "dream",
            "flux",
            "hidream",
            "hyvid",
            "llada",
            "llada-moe",
            "ltxv",
            "lumina2",
            "qwen_image",
            "rnd1",
            "sd1",
            "sd3",
            "sdxl",
            "wan",
        ),
        _DIFFUSES,
    ),
}


def kind_of(metadata: Mapping[str, Any]) -> str | None:
    """Returns a phrase that says what a file is instead of a language model; None if it may be one.

    Source of the values: `GGUFType` and `MODEL_ARCH` of the `gguf` package, and llama.cpp's
    converters.
    """
    for key, kinds in (("general.type", _TYPES), ("general.architecture", _ARCHITECTURES)):
        value = metadata.get(key)
        if isinstance(value, str) and value in kinds:
            return kinds[value]
    if any(key.startswith("imatrix.") for key in metadata):
        return _TYPES["imatrix"]
    if "adapter.type" in metadata:
        return _TYPES["adapter"]
    return None
