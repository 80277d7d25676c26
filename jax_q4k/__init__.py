"""GGUF models inside JAX programs.

Packed weights, jit-compatible primitives, and PTX kernels for GPUs.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from typing import TYPE_CHECKING, Any

from ptx_kernels import __version__

from . import lazy_imports

if TYPE_CHECKING:
    from ptx_kernels import formats

    from . import (
        cache,
        checkpoint_policies,
        collecting,
        control_groups,
        cpus,
        environment,
        gguf,
        gpu_checks,
        native,
        quantizers,
    )
    from .arrays import QuantizedArray, is_quantized
    from .arrays.planes import from_planes
    from .custom_call import EXPORT_CHECKS
    from .errors import (
        CheckpointError,
        CompiledFileError,
        GGUFError,
        GpuUnavailableWarning,
        KernelLoadError,
        NativeUnavailableWarning,
        UnavailableError,
    )
    from .explanation import Explanation, explain
    from .float_types import PAGE_DTYPES
    from .implementations import FUSIONS, IMPLEMENTATIONS
    from .kernel_loads import explaining_loads
    from .ops.append_kv import append_kv
    from .ops.attention import attention
    from .ops.backends import default_implementation
    from .ops.causal_attention import causal_attention
    from .ops.checks import HEAD_DIMS, LATENT_DIMS, page_dtype
    from .ops.dequantize import dequantize
    from .ops.embedding import embedding
    from .ops.expert_matmul import expert_matmul
    from .ops.expert_mlp import expert_mlp
    from .ops.gated_delta_rule import gated_delta_rule
    from .ops.gated_delta_step import gated_delta_step
    from .ops.gates import ACTIVATION_FUNCTIONS
    from .ops.linear import (
        gated_matmul,
        linear,
        matmul,
        qkv_matmul,
        rms_norm_matmul,
    )
    from .ops.mlp import mlp
    from .ops.paged_attention import paged_attention
    from .ops.paged_attention_matmul import paged_attention_matmul
    from .ops.qkv_rope_append import qkv_rope_append
    from .ops.quantize import quantize
    from .ops.quantize_q8_1 import quantize_q8_1
    from .ops.rms_norm import rms_norm
    from .ops.rope_append import rope_append
    from .ops.rotate import rotate
    from .ops.route import route
    from .ops.routed_mlp import routed_mlp
    from .ops.top_k import argmax, top_k
    from .selection import Selection, current_selection, implementation, selected
else:
    #: Module names of earlier versions -> where the module is now.
    _RENAMED = {
        "compiled": "cache.compiled_files",
        "kept": "cache.program_cache",
        "replacing": "cache.atomic_files",
    }
    #: Names that are looked for here.
    _OF_MODELS = ("load", "generate", "stream", "from_gguf", "from_pretrained", "Engine")
    _public, __dir__ = lazy_imports.attach(__name__)

    def __getattr__(name: str) -> Any:
        """Imports public names on first use, and modules by their earlier names with a warning."""
        if name in _OF_MODELS:
            message = (
                f"module {__name__!r} has no attribute {name!r}: it is {__name__}.models.{name}"
            )
            raise AttributeError(message, name=name)
        if name not in _RENAMED:
            return _public(name)
        message = f"jax_q4k.{name} is now jax_q4k.{_RENAMED[name]}"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return importlib.import_module(f".{_RENAMED[name]}", __name__)


__all__ = [
    "ACTIVATION_FUNCTIONS",
    "CheckpointError",
    "CompiledFileError",
    "EXPORT_CHECKS",
    "Explanation",
    "FUSIONS",
    "GGUFError",
    "HEAD_DIMS",
    "LATENT_DIMS",
    "IMPLEMENTATIONS",
    "GpuUnavailableWarning",
    "KernelLoadError",
    "NativeUnavailableWarning",
    "PAGE_DTYPES",
    "QuantizedArray",
    "Selection",
    "UnavailableError",
    "__version__",
    "append_kv",
    "argmax",
    "attention",
    "cache",
    "causal_attention",
    "checkpoint_policies",
    "collecting",
    "control_groups",
    "cpus",
    "current_selection",
    "default_implementation",
    "dequantize",
    "embedding",
    "environment",
    "expert_matmul",
    "expert_mlp",
    "explain",
    "explaining_loads",
    "formats",
    "from_planes",
    "gated_delta_rule",
    "gated_delta_step",
    "gated_matmul",
    "gguf",
    "gpu_checks",
    "implementation",
    "is_quantized",
    "lazy_imports",
    "linear",
    "matmul",
    "mlp",
    "native",
    "page_dtype",
    "paged_attention",
    "paged_attention_matmul",
    "qkv_matmul",
    "quantize",
    "qkv_rope_append",
    "quantize_q8_1",
    "quantizers",
    "rms_norm",
    "rms_norm_matmul",
    "rope_append",
    "rotate",
    "route",
    "routed_mlp",
    "selected",
    "top_k",
]

# Imports all but what few programs need: exported programs need the handlers and types that this
# registers. The script `jax-q4k` reads its arguments first, because JAX takes long to import.
if not hasattr(sys.modules.get("__main__"), "IMPORTS_JAX_LATER"):
    for _name in __all__:
        if _name not in ("cache", "gguf", "gpu_checks", "quantizers"):
            getattr(sys.modules[__name__], _name)
