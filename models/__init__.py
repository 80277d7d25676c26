"""Language models on top of `jax_q4k`: Flax NNX decoder, tokenizer and text generation.

Submodules are imported on first use, because importing Flax alone takes 0.2 s.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from jax_q4k.collecting import gc_throttled

if TYPE_CHECKING:
    from . import chat, sampling, tokenizer
    from .config import Config
    from .engine.conversation import Conversation
    from .engine.generate import generate, stream
    from .engine.outputs import Output, Piece, Timings, TokenLogprobs
    from .engine.prefix_cache import Prefix
    from .engine.request import ContextShift
    from .files.checkpoints.checkpoint import CheckpointSource, from_pretrained
    from .files.gguf import from_gguf, save_gguf
    from .files.load import load
    from .files.lora import with_lora
    from .files.mtp import load_nextn
    from .files.quantizing.imatrix import read_imatrix
    from .files.quantizing.quantize import quantize, quantize_file
    from .kv_cache import PagedCache
    from .kv_cache import recurrent_states as states
    from .network.build import named_tensors
    from .network.decoder import Decoder
    from .network.flax_types import Packed
    from .runner.exported_step import CompiledStep, compile_step, load_compiled
    from .runner.model import Model
    from .runner.programs import CUDA_COMPILER_OPTIONS, abstract_programs
    from .runner.speculative import drafts
    from .sampling import Sampling
    from .support.assets import demo_path
    from .tasks.embeddings import embed
    from .tasks.perplexity import Score, score

#: Public name of a module -> its path below this package.
_MODULES = {"drafts": "runner.speculative.drafts", "states": "kv_cache.recurrent_states"}

#: Public function or class -> the module that defines it.
_HOMES = {
    name: module
    for module, names in {
        "support.assets": ("demo_path",),
        "network.build": ("named_tensors",),
        "runner.exported_step": ("CompiledStep", "compile_step", "load_compiled"),
        "config.config": ("Config",),
        "engine.conversation": ("Conversation",),
        "network.decoder": ("Decoder",),
        "tasks.embeddings": ("embed",),
        "files.checkpoints.checkpoint": ("CheckpointSource", "from_pretrained"),
        "files.gguf": ("from_gguf", "save_gguf"),
        "files.quantizing.imatrix": ("read_imatrix",),
        "files.load": ("load",),
        "files.lora.adapters": ("with_lora",),
        "files.mtp": ("load_nextn",),
        "files.quantizing.quantize": ("quantize", "quantize_file"),
        "network.flax_types": ("Packed",),
        "engine.generate": ("generate", "stream"),
        "kv_cache.paged": ("PagedCache",),
        "runner.model": ("Model",),
        "engine.outputs": ("Output", "Piece", "Timings", "TokenLogprobs"),
        "engine.prefix_cache": ("Prefix",),
        "tasks.perplexity": ("Score", "score"),
        "runner.programs": ("CUDA_COMPILER_OPTIONS", "abstract_programs"),
        "engine.request": ("ContextShift",),
        "sampling.params": ("Sampling",),
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
        with gc_throttled():
            module = _HOMES.get(name) or _MODULES.get(name, name)
            found = importlib.import_module(f".{module}", __name__)
        if name in _HOMES:
            found = getattr(found, name)
        globals()[name] = found
        return found

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
