"""Counts and lists the kernels that a program launches, compiled ahead of time without a GPU.

python -m tools.launches [MODEL.gguf | --shape llama-3.1-8b] [--batch N] [--list PROGRAM]
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jax_q4k import float_types, models
from jax_q4k.models.runner.engine_state import EngineState
from ptx_kernels.devices import REFERENCE
from ptx_kernels.machine_code.ptxas import assemble, shared_split

from . import aot
from .random_model import (
    GEMMA_3_12B,
    GEMMA_4_31B,
    GLM_4_7_FLASH,
    LLAMA_3_1_8B,
    QWEN_3_6_35B_A3B,
    QWEN_3_30B_A3B,
    random_model,
)
from .thunks import Array, Thunk

SHAPES = {
    "llama-3.1-8b": LLAMA_3_1_8B,
    "qwen3-30b-a3b": QWEN_3_30B_A3B,
    "qwen3.6-35b-a3b": QWEN_3_6_35B_A3B,
    "gemma-3-12b": GEMMA_3_12B,
    "gemma-4-31b": GEMMA_4_31B,
    "glm-4.7-flash": GLM_4_7_FLASH,
}
DEFAULT_MODEL = Path(__file__).parents[1] / "tests/data/golden/llama-gqa.Q4_K_M.gguf"
_XLA_TYPES = {of.dtype.name: of.xla for of in float_types.PAGES}


def layer_launches(program: aot.Program, layer: int) -> list[Thunk]:
    """Returns the launches of a decoder layer, identified by the decoder's named scope.

    XLA keeps one of several equal loop bodies, whose launches then all count for the first layer.
    """
    return [
        t for t in program.launches if t.instruction and f"/layer{layer}/" in t.instruction.op_name
    ]


def page_array(arguments: Any) -> Array:
    """Returns a KV page array as XLA sees it: the first one in a program's arguments."""
    (state,) = (x for x in jax.tree.leaves(arguments, is_leaf=_has_pages) if _has_pages(x))
    pages = next(pages[0] for pages in state.pages if pages)
    return Array(_XLA_TYPES[str(jnp.dtype(pages.dtype))], tuple(pages.shape))


def _has_pages(x: Any) -> bool:
    return isinstance(x, models.PagedCache | EngineState)


def shared_splits(program: aot.Program) -> list[int]:
    """Returns the bytes of a multiprocessor's shared memory during each of our launches, in order.

    Raises:
      ToolNotFoundError: ptxas is not installed.
    """
    return [
        shared_split(
            assemble(program.ptx_text(t), REFERENCE.arch),
            math.prod(t.block or ()),
            t.shared_bytes or 0,
        )
        for t in program.ptx_launches
    ]


def describe(name: str, program: aot.Program, pages: Array, num_layers: int) -> str:
    """Formats a few lines about one program."""
    ours = {id(t) for t in program.ptx_launches}
    layers = [layer_launches(program, i) for i in range(num_layers)]
    per_layer = Counter((len(layer), sum(id(t) in ours for t in layer)) for layer in layers)
    outside = [t for t in program.launches if not t.is_in("kCommandBuffer")]
    in_graphs = [t for t in program.loops if t.is_in("kCommandBuffer")]
    copies = [t for t in program.launches if t.kind == "kCopy"]
    families = Counter(t.name for t in program.ptx_launches)
    splits = shared_splits(program)
    changes = sum(one != other for one, other in itertools.pairwise(splits))
    return "\n".join(
        [
            f"{name}: {len(program.launches)} launches, {len(ours)} of them ours, "
            f"{len(outside)} outside of CUDA graphs; {program.temp_bytes} bytes of temporaries",
            "  ours: " + ", ".join(f"{count} {family}" for family, count in families.most_common()),
            "  per layer: "
            + ", ".join(
                f"{total} launches, {mine} ours ({count} layers)"
                for (total, mine), count in per_layer.items()
            ),
            "  shared memory of a multiprocessor: "
            + ", ".join(f"{size >> 10} KB ({n})" for size, n in sorted(Counter(splits).items()))
            + f"; {changes} changes",
            f"  loops: {len(program.loops)}, in a CUDA graph: {len(in_graphs)};"
            f" copies: {len(copies)}; of KV page arrays {pages}: {len(program.rewrites(pages))}",
        ]
    )


def table(program: aot.Program) -> str:
    """Formats every launch in order; `*` marks ours."""
    ours = {id(t) for t in program.ptx_launches}
    rows = []
    for t in program.launches:
        results = ", ".join(map(str, t.instruction.results)) if t.instruction else ""
        shape = f"{t.grid} x {t.block}" if t.grid else ""
        scope = t.instruction.op_name.rpartition("/")[0] if t.instruction else ""
        rows.append(
            f"{t.id:4} {'*' if id(t) in ours else ' '} {t.name:36} {shape:30} {results}  {scope}"
        )
    return "\n".join(rows)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.launches", description=__doc__.split("\n")[0]
    )
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL, type=Path)
    parser.add_argument(
        "--shape", choices=list(SHAPES), help="a known model's shape instead of a file"
    )
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--prompt-length", type=int, default=8)
    parser.add_argument(
        "--capacity",
        type=int,
        default=1008,
        help="tokens of cache per sequence: no other array may be as large as a page array",
    )
    parser.add_argument("--cache-dtype", default="float32", choices=list(_XLA_TYPES))
    parser.add_argument(
        "--list", metavar="PROGRAM", help="list all launches of prefill, decode or generate"
    )
    options = parser.parse_args(arguments)
    if reason := aot.unavailable():
        print(reason, file=sys.stderr)
        return 3
    shape = SHAPES.get(options.shape)
    model = random_model(shape, abstract=True) if shape else models.from_gguf(options.model)
    programs = models.abstract_programs(
        model,
        batch=options.batch,
        prompt_length=options.prompt_length,
        capacity=options.capacity,
        cache_dtype=jnp.dtype(options.cache_dtype),
    )
    name, gpu = options.shape or options.model.name, aot.gpus()[0].device_kind
    print(f"{name} for {gpu}, JAX {jax.__version__}")
    for name, (function, args) in programs.items():
        program = aot.compile_program(function, *args, options=models.CUDA_COMPILER_OPTIONS)
        print(describe(name, program, page_array(args), model.config.num_layers))
        if name == options.list:
            print(table(program))
    return 0


if __name__ == "__main__":
    # nothing runs on a GPU; without its libraries, looking for one warns
    jax.config.update("jax_platforms", "cpu")
    sys.exit(main())
