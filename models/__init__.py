"""Language models on top of `jax_q4k`: Flax NNX decoder, tokenizer and text generation.

Submodules are imported on first use, because importing Flax alone takes 0.2 s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jax_q4k import lazy_imports

if TYPE_CHECKING:
    from . import chat, sampling, tokenizer
    from .config import Config
    from .engine.conversation import Conversation
    from .engine.encoder_engine import EncoderEngine
    from .engine.engine import Engine, EngineClosedError, EngineStats
    from .engine.generate import generate, stream
    from .engine.outputs import Output, Piece, Timings, TokenLogprobs
    from .engine.prefix_cache import Prefix
    from .engine.request import ContextShift, Request
    from .files.checkpoints.checkpoint import CheckpointSource, from_pretrained
    from .files.gguf import from_gguf, save_gguf
    from .files.load import load
    from .files.lora import read_lora, with_lora
    from .files.merging import merge
    from .files.mtp import load_nextn
    from .files.quantizing.imatrix import load_imatrix, read_imatrix, save_imatrix
    from .files.quantizing.plan import QuantizationPlan
    from .files.quantizing.quantize import quantization_plan, quantize, quantize_file
    from .kv_cache import PagedCache
    from .kv_cache import recurrent_states as states
    from .network.build import named_tensors
    from .network.decoder import Decoder
    from .network.encoder import Encoder
    from .network.flax_types import Packed
    from .runner.abstract_programs import abstract_programs
    from .runner.adapters import Adapter
    from .runner.exported_step import CompiledStep, compile_step, load_compiled
    from .runner.imatrix import ImportanceMatrix
    from .runner.model import Model
    from .runner.programs import CUDA_COMPILER_OPTIONS
    from .runner.speculative import drafts
    from .sampling import Constraint, ConstraintError, Sampling, Thought
    from .server.run import serve
    from .support.assets import demo_path
    from .tasks.base_logits import BaseLogitsError, save_base_logits
    from .tasks.divergence import Divergence, kl_divergence
    from .tasks.embeddings import embed
    from .tasks.estimates import Estimate
    from .tasks.imatrix import imatrix
    from .tasks.perplexity import Score, score
    from .tasks.rerank import Ranked, rerank

__all__ = [
    "CUDA_COMPILER_OPTIONS",
    "Adapter",
    "BaseLogitsError",
    "CheckpointSource",
    "CompiledStep",
    "Config",
    "Constraint",
    "ConstraintError",
    "ContextShift",
    "Conversation",
    "Decoder",
    "Divergence",
    "Encoder",
    "EncoderEngine",
    "Engine",
    "EngineClosedError",
    "EngineStats",
    "Estimate",
    "ImportanceMatrix",
    "Model",
    "Output",
    "Packed",
    "PagedCache",
    "Piece",
    "Prefix",
    "QuantizationPlan",
    "Ranked",
    "Request",
    "Sampling",
    "Score",
    "Thought",
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
    "imatrix",
    "kl_divergence",
    "load",
    "load_compiled",
    "load_imatrix",
    "load_nextn",
    "merge",
    "named_tensors",
    "quantization_plan",
    "quantize",
    "quantize_file",
    "read_imatrix",
    "read_lora",
    "rerank",
    "sampling",
    "save_base_logits",
    "save_gguf",
    "save_imatrix",
    "score",
    "serve",
    "states",
    "stream",
    "tokenizer",
    "with_lora",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_imports.attach(__name__)
