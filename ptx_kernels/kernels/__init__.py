"""The kernel families."""

from __future__ import annotations

from collections.abc import Callable

from ..ptx import Kernel
from .append_kv import append_kv
from .argmax import argmax
from .attention import merge_attention, paged_attention
from .decode import decode
from .gemm import gemm
from .matvec import gated_matvec, matvec, qkv_matvec
from .quantize_f16 import quantize_f16
from .quantize_q8_1 import quantize_q8_1
from .rms_norm import rms_norm
from .rope_append import rope_append
from .top_k import top_k

_PRODUCTS = (quantize_q8_1, quantize_f16, rms_norm, matvec, gated_matvec, qkv_matvec, gemm, decode)
_OTHERS = (append_kv, rope_append, paged_attention, merge_attention, argmax, top_k)
KERNELS: dict[str, Callable[..., Kernel]] = {f.__name__: f for f in (*_PRODUCTS, *_OTHERS)}
