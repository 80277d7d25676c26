"""Flax NNX decoder, tokenizer, generation: the model that runs on top of `jax_q4k`."""

from __future__ import annotations

from . import chat, sampling, tokenizer
from .assets import demo_path
from .config import Config
from .decoder import Decoder
from .files.checkpoint import CheckpointSource, from_pretrained
from .files.gguf import from_gguf, save_gguf
from .files.imatrix import read_imatrix
from .files.load import load
from .files.quantize import quantize, quantize_file
from .generate import Output, Piece, Timings, generate, stream
from .kv_cache import PagedCache
from .model import Model
from .perplexity import Score, score
from .programs import CUDA_COMPILER_OPTIONS, abstract_programs
from .sampling import Sampling
from .tensors import named_tensors

__all__ = [
    "CUDA_COMPILER_OPTIONS",
    "CheckpointSource",
    "Config",
    "Decoder",
    "Model",
    "Output",
    "PagedCache",
    "Piece",
    "Sampling",
    "Score",
    "Timings",
    "abstract_programs",
    "chat",
    "demo_path",
    "from_gguf",
    "from_pretrained",
    "generate",
    "load",
    "named_tensors",
    "quantize",
    "quantize_file",
    "read_imatrix",
    "sampling",
    "save_gguf",
    "score",
    "stream",
    "tokenizer",
]
