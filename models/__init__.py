"""Flax NNX decoder, tokenizer, generation: the model that runs on top of `jax_q4k`.

Its modules are imported when one of their names is first used: Flax alone takes a fifth of a
second.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from jax_q4k.collecting import seldom_collecting

if TYPE_CHECKING:
    from . import chat, drafts, sampling, states, tokenizer
    from .assets import demo_path
    from .build import named_tensors
    from .compiled import CompiledStep, compile_step, load_compiled
    from .config import Config
    from .conversation import Conversation
    from .decoder import Decoder
    from .embeddings import embed
    from .files.checkpoint import CheckpointSource, from_pretrained
    from .files.gguf import from_gguf, save_gguf
    from .files.imatrix import read_imatrix
    from .files.load import load
    from .files.lora import with_lora
    from .files.nextn import load_nextn
    from .files.quantize import quantize, quantize_file
    from .flax_types import Packed
    from .generation import generate, stream
    from .kv_cache import PagedCache
    from .model import Model
    from .outputs import Output, Piece, Timings, TokenLogprobs
    from .perplexity import Score, score
    from .prefix import Prefix
    from .programs import CUDA_COMPILER_OPTIONS, abstract_programs
    from .request import ContextShift
    from .sampling import Sampling

#: Name -> the module that has it, where that is not a module itself.
_HOMES = {
    name: module
    for module, names in {
        "assets": ("demo_path",),
        "build": ("named_tensors",),
        "compiled": ("CompiledStep", "compile_step", "load_compiled"),
        "config": ("Config",),
        "conversation": ("Conversation",),
        "decoder": ("Decoder",),
        "embeddings": ("embed",),
        "files.checkpoint": ("CheckpointSource", "from_pretrained"),
        "files.gguf": ("from_gguf", "save_gguf"),
        "files.imatrix": ("read_imatrix",),
        "files.load": ("load",),
        "files.lora": ("with_lora",),
        "files.nextn": ("load_nextn",),
        "files.quantize": ("quantize", "quantize_file"),
        "flax_types": ("Packed",),
        "generation": ("generate", "stream"),
        "kv_cache": ("PagedCache",),
        "model": ("Model",),
        "outputs": ("Output", "Piece", "Timings", "TokenLogprobs"),
        "prefix": ("Prefix",),
        "perplexity": ("Score", "score"),
        "programs": ("CUDA_COMPILER_OPTIONS", "abstract_programs"),
        "request": ("ContextShift",),
        "sampling": ("Sampling",),
    }.items()
    for name in names
}

__all__ = [
    "CUDA_COMPILER_OPTIONS",
    "CheckpointSource",
    "CompiledStep",
    "Config",
    "ContextShift",
    "Conversation",
    "Decoder",
    "Model",
    "Output",
    "Packed",
    "PagedCache",
    "Piece",
    "Prefix",
    "Sampling",
    "Score",
    "Timings",
    "TokenLogprobs",
    "abstract_programs",
    "chat",
    "compile_step",
    "demo_path",
    "drafts",
    "embed",
    "from_gguf",
    "from_pretrained",
    "generate",
    "load",
    "load_compiled",
    "load_nextn",
    "named_tensors",
    "quantize",
    "quantize_file",
    "read_imatrix",
    "sampling",
    "save_gguf",
    "score",
    "states",
    "stream",
    "tokenizer",
    "with_lora",
]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _HOMES and name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        with seldom_collecting():
            found = importlib.import_module(f".{_HOMES.get(name, name)}", __name__)
        if name in _HOMES:
            found = getattr(found, name)
        globals()[name] = found
        return found

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
