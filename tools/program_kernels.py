"""Lists the distinct kernels of a model's programs, and how often each is launched.

A program is compiled ahead of time for an H200 from the first few layers of a shape. Every layer of
the full model then counts as the one among them with the same tensor types, mixer, window and
heads. A model of any depth therefore takes seconds.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import jax_q4k as jq
from jax_q4k import models
from jax_q4k.models.config import Config
from ptx_kernels.devices import REFERENCE, Device
from ptx_kernels.machine_code.work import packed_weights
from ptx_kernels.ptx import Kernel
from ptx_kernels.ptx.oldest import COMMON

from . import aot
from .random_model import (
    GEMMA_3_12B,
    LLAMA_3_1_8B,
    QWEN_3_30B_A3B,
    first_layers,
    random_model,
    tensor_types,
)
from .thunks import Thunk

SHAPES: dict[str, Config] = {
    "llama-3.1-8b": LLAMA_3_1_8B,
    "qwen3-30b-a3b": QWEN_3_30B_A3B,
    "gemma-3-12b": GEMMA_3_12B,
}
BATCHES = (1, 2, 4, 8, 16, 32)
PROMPTS = (512, 4096)
PIECES = ((256, 4096),)  # tokens of a prompt chunk, and tokens in the cache before it
CONTEXT = 512  # tokens of a sequence that a decode step reads
CACHE_DTYPE = jnp.bfloat16
_PAGE = 16  # tokens: a cache holds a whole number of pages

_LAYER = re.compile(r"/layer(\d+)/")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_PARTS = re.compile(r"(?:condition|body)=%?([\w.-]+)")  # of a while instruction
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.-]+) .*\{$")
_NAME = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = ")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


@dataclass(frozen=True)
class Asked:
    """A program of a shape: one token of `batch` sequences, or a prompt of `prompt` tokens.

    Attributes:
      shape: a key of SHAPES.
      prompt: 0 for a decode step.
      context: tokens that each sequence of a decode step has capacity for and holds.
      before: tokens in the cache before the prompt.
    """

    shape: str
    batch: int = 1
    prompt: int = 0
    context: int = CONTEXT
    before: int = 0

    @property
    def tokens(self) -> int:
        """Number of tokens that the program generates or processes."""
        return self.batch * max(1, self.prompt)

    def __str__(self) -> str:
        what = f"prompt of {self.prompt}" if self.prompt else f"batch {self.batch}"
        after = f" behind {self.before}" if self.before else ""
        return f"{self.shape}, {what}{after}"


@dataclass(frozen=True)
class ProgramKernels:
    """Launches of one program of the full model.

    Attributes:
      sequence: its launches in order, ours or XLA's, with the number of runs of each: loop
        iterations times the layers that the launch represents.
      hlo: the compiled text that contains the instructions of `xla`.
    """

    asked: Asked
    sequence: tuple[tuple[Kernel | Thunk, int], ...]
    hlo: str

    @functools.cached_property
    def kernels(self) -> dict[Kernel, int]:
        """Our kernels -> number of launches."""
        counts: Counter[Kernel] = Counter()
        for launch, times in self.sequence:
            if isinstance(launch, Kernel) and times:
                counts[launch] += times
        return dict(counts)

    @property
    def xla(self) -> list[tuple[Thunk, int]]:
        """XLA's own launches, with the number of runs of each."""
        return [(each, n) for each, n in self.sequence if n and not isinstance(each, Kernel)]

    @property
    def launches(self) -> int:
        return sum(count for _, count in self.sequence)


@functools.cache
def program_kernels(asked: Asked) -> ProgramKernels:
    """Compiles the program; results are cached by the argument.

    Raises:
      RuntimeError: JAX's CUDA plugin is not installed.
    """
    config = SHAPES[asked.shape]
    cut, like = _cut(config)
    model = random_model(cut, abstract=True)
    function, arguments = _program(model, asked)
    program = aot.compile_program(function, *arguments, options=models.CUDA_COMPILER_OPTIONS)
    calls = jq.explain(
        function, *arguments, platform="cuda", device=f"NVIDIA {REFERENCE.name}"
    ).calls
    # the text alone does not determine the number of rows of a launch
    explained: dict[tuple[str, tuple[int, ...] | None], Kernel] = {
        (kernel.text, kernel.grid): kernel for call in calls for kernel in call.kernels
    }
    ours = set(map(id, program.ptx_launches))
    sequence: list[tuple[Kernel | Thunk, int]] = []
    of_layer, loops = Counter(like), _loops(program.hlo)
    for launch in program.launches:
        layer, times = _place(launch, loops)
        times *= 1 if layer is None else of_layer[layer]
        known = id(launch) in ours
        kernel = explained[program.ptx_text(launch), launch.grid] if known else launch
        sequence.append((kernel, times))
    return ProgramKernels(asked, tuple(sequence), program.hlo)


def chosen_kernels(asked: Asked, device: Device) -> list[Kernel]:
    """Returns the distinct kernels that a program launches on a device, without compiling it."""
    cut, _ = _cut(SHAPES[asked.shape])
    dtype = jnp.float16 if device.sm < COMMON else CACHE_DTYPE
    function, arguments = _program(random_model(cut, abstract=True), asked, dtype)
    calls = jq.explain(function, *arguments, platform="cuda", device=f"NVIDIA {device.name}").calls
    return list(dict.fromkeys(kernel for call in calls for kernel in call.kernels))


def label(kernel: Kernel) -> str:
    """Returns a label such as `gemm_q4_k_m32 14336x4096`; only the name if it is not a product."""
    packed = packed_weights(kernel)
    if packed is None:
        return kernel.name
    columns = kernel.arguments["columns"]
    rows = kernel.arguments.get("n") or packed.count // columns
    return f"{kernel.name} {rows}x{columns}"


def _program(
    model: models.Model, asked: Asked, cache_dtype: Any = CACHE_DTYPE
) -> tuple[Any, tuple[Any, ...]]:
    """Returns the jitted function and its arguments' shapes."""
    if not asked.before:
        programs = models.abstract_programs(
            model,
            batch=asked.batch,
            prompt_length=asked.prompt or 8,  # for a decode step, it belongs to the other program
            capacity=-(-max(asked.prompt, asked.context) // _PAGE) * _PAGE,
            cache_dtype=cache_dtype,
        )
        return programs["prefill" if asked.prompt else "decode"]

    def extend(weights: Any, tokens: Any, lengths: Any, cache: Any) -> Any:
        return model.decoder(weights).extend(tokens, lengths, cache, every=False)

    def cache() -> models.PagedCache:
        options = {"dtype": cache_dtype, "ahead": asked.prompt}
        capacity = asked.before + asked.prompt
        return models.PagedCache.create(model.config, asked.batch, capacity, **options)

    struct = jax.ShapeDtypeStruct
    weights = jax.tree.map(lambda leaf: struct(leaf.shape, leaf.dtype), model.weights)
    tokens = struct((asked.batch, asked.prompt), jnp.int32)
    lengths = struct((asked.batch,), jnp.int32)
    arguments = weights, tokens, lengths, jax.eval_shape(cache)
    return jax.jit(extend, donate_argnums=3), arguments


class _Loop(NamedTuple):
    """A loop of the compiled program: the layer that it belongs to, and its iterations."""

    layer: int | None
    turns: int


def _place(launch: Thunk, loops: dict[str, _Loop]) -> tuple[int | None, int]:
    """Returns a launch's layer, None outside of layers, and its repetitions in a loop.

    The enclosing loop determines the layer: XLA gives equal bodies the names of the first layer's.
    """
    instruction = launch.instruction
    if any(parent.kind == "kWhile" for parent in launch.parents):
        if instruction is None or instruction.name not in loops:
            raise ValueError(f"{launch.name} runs in a loop that the compiled text does not show")
        return loops[instruction.name]
    return _layer(instruction.op_name if instruction else ""), 1


def _layer(op_name: str) -> int | None:
    found = _LAYER.search(op_name)
    return int(found[1]) if found else None


def _loops(hlo: str) -> dict[str, _Loop]:
    """Maps each instruction in a loop's body or condition to that loop.

    Raises:
      ValueError: XLA does not know the number of iterations of a loop.
    """
    loops, computation, found = {}, "", {}
    lines = hlo.splitlines()
    for line in lines:
        if " while(" in line:
            turns, op_name = _TRIPS.search(line), _OP_NAME.search(line)
            if turns is None:
                raise ValueError(f"XLA knows no number of turns of {line.split(' = ')[0].strip()}")
            loop = _Loop(_layer(op_name[1] if op_name else ""), int(turns[1]))
            loops.update({name: loop for name in _PARTS.findall(line)})
    for line in lines:
        if head := _COMPUTATION.match(line):
            computation = head[1]
        elif computation in loops and (name := _NAME.match(line)):
            found[name[1]] = loops[computation]
    return found


def _cut(config: Config) -> tuple[Config, tuple[int, ...]]:
    """Returns the fewest first layers with all kinds, and for each layer of `config` a similar one.

    An inner layer represents those of its kind, because XLA fuses surrounding code into the first
    and the last. The last layer, whose launches prefetch the output's weights, is represented by
    the last of these, or by an inner one if that is of another kind.
    """
    *wanted, (last, _) = _kinds(config)
    for count in range(3, config.num_layers):
        cut = first_layers(config, count)
        *kinds, (layers, _) = _kinds(cut)
        inner = {kind: layer for layer, kind in enumerate(kinds) if layer}
        alike = [layer for (kind, _), layer in inner.items() if kind == last]
        if set(wanted) <= set(inner) and (layers == last or alike):
            return cut, (
                *(inner[kind] for kind in wanted),
                count - 1 if layers == last else alike[0],
            )
    return config, tuple(range(config.num_layers))


def _kinds(config: Config) -> list[tuple[Any, ...]]:
    """Returns what distinguishes each layer: tensor types, mixer, window and heads.

    Also the mixer of the next layer, whose weights the launches prefetch; None for the last.
    """
    types: list[dict[str, str]] = [{} for _ in range(config.num_layers)]
    for name, kind in tensor_types(config).items():
        if name.startswith("blk."):
            _, layer, rest = name.split(".", 2)
            types[int(layer)][rest] = kind
    layers = [
        (
            tuple(sorted(types[layer].items())),
            config.mixer_of(layer),
            config.window_of(layer),
            config.kv_heads_of(layer),
        )
        for layer in range(config.num_layers)
    ]
    mixers = [
        tuple(pair for pair in types if not pair[0].startswith("ffn")) for types, *_ in layers[1:]
    ]
    return list(zip(layers, [*mixers, None], strict=True))
