"""Predicts a decode step's time by kind of layer for an H200, with the lower bound of its bytes.

Nothing is measured. Our launches have the times of `ptx_kernels.machine_code.model`. Each XLA
launch has the time of a kernel that waits once for memory.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp

import jax_q4k as jq
from jax_q4k import models
from jax_q4k.models.config import Config
from jax_q4k.models.config.tensors import expected_tensors
from ptx_kernels import formats
from ptx_kernels.devices import DEVICES
from ptx_kernels.machine_code.model import LAUNCH, MEMORY_LATENCY
from ptx_kernels.machine_code.report import plain_table

from . import aot
from .launches import layer_launches
from .random_model import (
    GEMMA_4_31B,
    GLM_4_7_FLASH,
    QWEN_3_6_35B_A3B,
    first_layers,
    random_model,
    tensor_types,
)

DEVICE = DEVICES["H200"]
CONTEXT = 512  # tokens
CACHE_DTYPE = jnp.bfloat16
XLA_LAUNCH = LAUNCH + MEMORY_LATENCY  # seconds, for a kernel that reads and writes little

#: Model -> (its first layers, which include every kind; kind -> number of such a layer).
LAYERS = {
    "Qwen 3.6 35B-A3B": (first_layers(QWEN_3_6_35B_A3B, 4), {"delta net": 0, "attention": 3}),
    "Gemma 4 31B": (first_layers(GEMMA_4_31B, 6), {"local": 0, "global": 5}),
    "GLM 4.7 Flash": (first_layers(GLM_4_7_FLASH, 2), {"latent attention": 1}),
}


@dataclass(frozen=True)
class LayerTime:
    """One layer in a step of one sequence of CONTEXT tokens.

    Attributes:
      launches, ours: number of kernels, and how many of them are ours.
      nbytes: bytes of the weights that a token uses, and of keys and values or states.
      seconds, xla_seconds: predicted time of all launches, and of XLA's.
    """

    model: str
    kind: str
    launches: int
    ours: int
    nbytes: int
    seconds: float
    xla_seconds: float

    @property
    def limit(self) -> float:
        """Seconds that the bytes take at a copy's bandwidth."""
        return self.nbytes / DEVICE.bandwidth


class DecodeStep(NamedTuple):
    """One token's program: the jitted function, its arguments' shapes, and the compiled program."""

    function: Any
    arguments: tuple[Any, ...]
    program: aot.Program


@functools.cache
def decode_step(config: Config) -> DecodeStep:
    """Compiles the decode step of one sequence of up to CONTEXT tokens for an H200."""
    model = random_model(config, abstract=True)
    programs = models.abstract_programs(model, capacity=CONTEXT, cache_dtype=CACHE_DTYPE)
    function, arguments = programs["decode"]
    program = aot.compile_program(function, *arguments, options=models.CUDA_COMPILER_OPTIONS)
    return DecodeStep(function, arguments, program)


def layer_times() -> list[LayerTime]:
    """Predicts every kind of LAYERS."""
    return [
        time for model, (config, kinds) in LAYERS.items() for time in times_of(model, config, kinds)
    ]


def times_of(model: str, config: Config, kinds: dict[str, int]) -> list[LayerTime]:
    """Predicts some layers of a shape, each with the name of its kind."""
    function, arguments, program = decode_step(config)
    calls = jq.explain(
        function, *arguments, platform="cuda", device=f"NVIDIA {DEVICE.name}", predict=True
    ).calls
    predicted = {
        kernel.text: figures.seconds
        for call in calls
        for kernel, figures in zip(call.kernels, call.figures, strict=True)
    }
    ours = set(map(id, program.ptx_launches))
    found = []
    for kind, layer in kinds.items():
        launches = layer_launches(program, layer)
        times = [predicted[program.ptx_text(t)] for t in launches if id(t) in ours]
        if None in times:
            raise ValueError(f"the model predicts no time of a kernel of a {kind} layer of {model}")
        xla = XLA_LAUNCH * (len(launches) - len(times))
        seconds = sum(time for time in times if time is not None) + xla
        nbytes = layer_bytes(config, layer)
        found.append(LayerTime(model, kind, len(launches), len(times), nbytes, seconds, xla))
    return found


def layer_bytes(config: Config, layer: int) -> int:
    """Returns the bytes a token must move for a layer: weights, and keys and values or a state.

    Of a mixture of experts, only the experts that a token uses count. A state's matrices count
    twice, read and written; of its ring of columns, those that are read and the one that is
    written.
    """
    total, expected = 0.0, expected_tensors(config)
    for name, kind in tensor_types(config).items():
        if name.startswith(f"blk.{layer}."):
            used = 1.0
            if "_exps." in name and config.experts is not None:
                used = config.experts.used / config.experts.count
            total += used * tensor_bytes(kind, expected[name].shape)
    if config.mixer_of(layer) == "delta" and (delta := config.delta) is not None:
        matrices = delta.value_heads * delta.head_dim**2
        return round(total) + 4 * (2 * matrices + delta.width * delta.channels)
    tokens = min(CONTEXT, config.window_of(layer) or CONTEXT)
    if config.latent is not None:
        token = config.latent.rank + config.rope_dim
    else:
        token = 2 * config.kv_heads_of(layer) * config.head_dim_of(layer)
    return round(total) + jnp.dtype(CACHE_DTYPE).itemsize * tokens * token


def tensor_bytes(kind: str, shape: tuple[int, ...]) -> int:
    """Returns the bytes of a tensor of ggml's type `kind`."""
    if kind in ("F32", "BF16"):
        return math.prod(shape) * (4 if kind == "F32" else 2)
    block = formats.get(kind)
    return math.prod(shape) // block.block_size * block.block_bytes


def table(times: Iterable[LayerTime]) -> str:
    """Formats a row for each layer."""
    header = ("predicted, H200", "launches", "ours", "MB", "limit us", "predicted us", "XLA's us")
    rows = [
        (
            f"{t.model}, {t.kind}",
            str(t.launches),
            str(t.ours),
            f"{t.nbytes / 1e6:.1f}",
            f"{t.limit * 1e6:.1f}",
            f"{t.seconds * 1e6:.1f}",
            f"{t.xla_seconds * 1e6:.1f}",
        )
        for t in times
    ]
    return plain_table(header, rows)
