"""Decodes checkpoints of NVIDIA's ModelOpt: NVFP4 and FP8, also mixed.

Source: ModelOpt's torch/quantization/qtensor/nvfp4_tensor.py: `weight` holds E2M1 codes, the even
ones in low nibbles, with E4M3 `weight_scale` of 16 and a float `weight_scale_2`. In FP8, `weight`
holds the numbers, with a float `weight_scale`.
"""

from __future__ import annotations

from collections.abc import Iterator

from ....support.json_fields import JSONFields
from ..safetensors import Weights
from .base import PackedTensor, beside, modules
from .fp4 import fp4
from .fp8 import FLOAT8
from .scaled import scaled

_ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "W4A16_NVFP4", "MIXED_PRECISION")


def find(weights: Weights, settings: JSONFields) -> Iterator[PackedTensor]:
    """Yields the NVFP4 and FP8 weights."""
    algorithm = settings.string("quant_algo", None)
    if algorithm is not None and algorithm not in _ALGORITHMS:
        problem = f"is {algorithm!r:.100}, which is not supported"
        settings.fail("quant_algo", f"{problem}; supported: {', '.join(_ALGORITHMS)}")
    for module in modules(weights, "weight_scale"):
        if (smoothing := f"{module}.pre_quant_scale") in weights.stored:
            weights.fail(smoothing, "scales activations, which is not supported")
        name, scale, common = (
            f"{module}.{part}" for part in ("weight", "weight_scale", "weight_scale_2")
        )
        further, found = beside(weights, module), weights.expect(name, ("U8", *FLOAT8))
        if found.dtype == "U8":
            yield fp4(weights, name, "NVFP4", name, scale, common=common, further=further)
        else:
            yield scaled(weights, name, scale, further=further)
