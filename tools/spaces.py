"""Search spaces of `tools.tune`: shapes and Configs for each rule that tables overrule."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ptx_kernels.devices import target
from ptx_kernels.formats import get as block_format
from ptx_kernels.formats import names
from ptx_kernels.kernels import KERNELS
from ptx_kernels.kernels.family import Rule
from ptx_kernels.kernels.gemm import GemmConfig, gemm_rule
from ptx_kernels.kernels.matvec import PRESETS, MatvecConfig, fused_matvec_rule, matvec_rule
from ptx_kernels.kernels.matvec.rules import INLINE_VALUES, even_blocks, slim
from ptx_kernels.kernels.quantize_q8_1 import GROUP
from ptx_kernels.ptx import Kernel, KernelError


@dataclass(frozen=True)
class Sizes:
    """Rows and columns of a model's matrices."""

    hidden: int
    kv: int  # rows of the key and the value matrix
    inner: int
    vocabulary: int


LLAMA_8B = Sizes(4096, 1024, 14336, 128256)  # Llama 3.1
LLAMA_1B = Sizes(2048, 512, 8192, 128256)  # Llama 3.2
QWEN_0_5B = Sizes(896, 128, 4864, 151936)  # Qwen 2.5

#: (n, columns) of these models' matrices; a row serves shapes within an octave.
SHAPES = (
    *((4096, 4096), (14336, 4096), (4096, 14336), (128256, 4096), (1024, 4096)),
    *((512, 2048), (2048, 2048), (8192, 2048), (128256, 2048)),
    *((896, 896), (4864, 896)),
)
#: Block formats, the most important first, since time may be short: the three that most files use,
#: then other super-block formats, last those without tensor-core products.
_MOST = ("Q4_K", "Q5_K", "Q6_K")


def _rare(name: str) -> tuple[bool, int, str]:
    block = block_format(name)
    return block.int8_tile is None, -block.block_size, name


FORMATS = _MOST + tuple(sorted({*names()} - {*_MOST}, key=_rare))
ROWS = (1, 2, 4, 8)  # of activations, for mat-vecs
PROMPTS = (16, 32, 64, 128, 256, 512)  # of activations, for prompts

Shape = tuple[Any, ...]


@dataclass(frozen=True)
class Space:
    """Search space of one rule.

    Attributes:
      of: the rule.
      shapes: formats -> shapes of a table, the most important first, since time may be short.
      varied: (shape, the rule's Config, multiprocessors) -> Configs to try in addition to the
        rule's.
      kernel: shape -> family of the kernel that represents the rule, and its arguments except the
        Config. None: the family has the rule's name and arguments.
      code_shape: shape -> shape whose machine code the model uses for it; that of other shapes
        differs only in constants.
    """

    of: Rule
    shapes: Callable[[Sequence[str]], Iterator[Shape]]
    varied: Callable[[Shape, Any, int], Sequence[Any]]
    kernel: Callable[[Shape], tuple[str, dict[str, Any]]] | None = None
    code_shape: Callable[[Shape], Shape] = lambda shape: shape

    @property
    def rule(self) -> str:
        """Name of the rule."""
        return self.of.name

    def of_rule(self, shape: Shape, multiprocessors: int) -> Any:
        """Returns the rule's choice."""
        return self.of(target(multiprocessors=multiprocessors), *shape)

    def candidates(self, shape: Shape, multiprocessors: int) -> tuple[Any, ...]:
        """Returns valid Configs to try for the shape: the rule's, and its variations."""
        first = self.of_rule(shape, multiprocessors)
        found = dict.fromkeys([first, *self.varied(shape, first, multiprocessors)])
        return tuple(config for config in found if self.of.accepts(config, shape))

    def _named(self, shape: Shape) -> dict[str, Any]:
        """Returns the rule's arguments by name."""
        return dict(zip(self.of.keys, shape, strict=True))

    def build(self, shape: Shape, config: Any) -> Kernel | None:
        """Builds the kernel of a shape; returns None if the Config is invalid for it."""
        family, arguments = self.kernel(shape) if self.kernel else (self.rule, self._named(shape))
        try:
            return KERNELS[family](**arguments, config=config)
        except KernelError:
            return None

    def row(self, shape: Shape, config: Any, seconds: float, why: str = "") -> dict[str, Any]:
        """Returns a table's row, with the Config's fields that differ from their defaults."""
        default = type(config)()
        fields = {
            name: value for name, value in vars(config).items() if value != getattr(default, name)
        }
        row = {"kernel": self.rule, **self._named(shape), "config": fields, "seconds": seconds}
        return row | ({"why": why} if why else {})


def _one_matrix(
    rule: Rule, config: Any, formats: Sequence[str], rows: Sequence[int]
) -> Iterator[Shape]:
    """Yields one matrix of each of SHAPES, with each number of rows of activations.

    Formats skip columns that are not a multiple of their blocks, which the Config check tells.
    """
    for m in rows:
        for n, columns in SHAPES:
            shapes = ((format, n, columns, m) for format in formats)
            yield from (shape for shape in shapes if rule.accepts(config, shape))


# --- matvec ---


def matvec_configs(m: int) -> tuple[MatvecConfig, ...]:
    """Returns the q8_1 presets and variations of them.

    For one row of activations loads are the limit, and the model does not see partially read lines,
    so only eight lanes or more, which read complete lines, are tried.
    """
    named = [
        c for c in PRESETS.values() if c.activations == "q8_1" and c.lanes >= (8 if m == 1 else 4)
    ]
    varied = [
        MatvecConfig(
            lanes=lanes,
            rows_per_warp=rows,
            unroll=unroll,
            warps_per_row=warps,
            resident_blocks=3 if m > 2 else 6 if lanes == 8 and m == 1 else 4,
        )
        for lanes in ((8,) if m == 1 else (8, 4))
        for rows in (1, 2)
        for unroll in ((1, 2, 4) if m == 1 else (1,))
        for warps in (1, 2, 4)
    ]
    return tuple(dict.fromkeys([*named, *varied]))


# --- fused_matvec ---


def _fused_shapes(formats: Sequence[str]) -> Iterator[Shape]:
    """Yields a layer's products, and that of norm with the output head.

    A layer's products are norm with Q, K, V; output; norm with gate and up; and down. All have one
    format. For Q4_K and Q5_K, V and down are tried in Q6_K too, like in llama.cpp's mixed recipes.
    Q5_0 and Q5_1 replace formats of 256 weights where rows are not a multiple of that, as in
    Qwen2.5-0.5B.
    """
    for m in ROWS:
        for model, format in itertools.product((LLAMA_8B, LLAMA_1B, QWEN_0_5B), formats):
            if model == QWEN_0_5B or format not in ("Q5_0", "Q5_1"):
                mixed = ("Q6_K",) if format in ("Q4_K", "Q5_K") and "Q6_K" in formats else ()
                h, inner = model.hidden, model.inner
                joined = [((format, format, v), (h, model.kv, model.kv)) for v in (format, *mixed)]
                found: list[Shape] = [(names, rows, h, m, True, "f32") for names, rows in joined]
                found += [
                    ((format, format), (inner,), h, m, True, "q8_1"),
                    ((format,), (h,), inner, m, False, "f32"),
                    ((format,), (h,), h, m, True, "f32"),
                    ((format,), (model.vocabulary,), h, m, True, "f32"),
                ]
                yield from (
                    shape
                    for shape in found
                    if fused_matvec_rule.accepts(fused_matvec_rule(target(), *shape), shape)
                )


def fused_configs(shape: Shape, rule: MatvecConfig, multiprocessors: int) -> list[MatvecConfig]:
    """Returns Configs with changed loads in flight, warps per block, or rows per warp.

    Blocks stay even if the rule's are, and a multiprocessor keeps as many warps. Quantization stays
    as in the rule, which weighs a separate launch against it.
    """
    formats, rows, columns, m, _, output = shape
    changed = [replace(rule, unroll=unroll) for unroll in (1, 2)] if m == 1 else []
    # more activations need more registers
    widths = (4, 8, 16) if m <= 2 or output == "q8_1" else (rule.warps,)
    for warps, per_warp in itertools.product(widths, (1, 2, 4)):
        config = slim(replace(rule, warps=warps, rows_per_warp=per_warp), formats, columns)
        if (
            output == "q8_1"
            and config.block_rows % GROUP == 0
            or rule.warps == warps
            or rule.rows_per_warp == per_warp
        ):
            resident = max(1, rule.warps * rule.resident_blocks // warps)
            even = (
                even_blocks(rows, config.block_rows, resident, multiprocessors)
                if rule.persistent
                else 0
            )
            changed.append(replace(config, resident_blocks=resident, persistent=even))
    return [*changed, replace(rule, persistent=0)]


def _fused_kernel(shape: Shape) -> tuple[str, dict[str, Any]]:
    """Returns kernel and arguments: one matrix adds a residual, two of equal rows are gated.

    Others are joined. All except the single matrix are normalized.
    """
    formats, rows, columns, m, floats, output = shape
    sizes = dict(columns=columns, m=m)
    norm = dict(norm=True, eps=1e-5) if floats and m * columns <= INLINE_VALUES else {}
    if len(formats) == 1:
        return "matvec", dict(format=formats[0], n=rows[0], residual=True, output=output, **sizes)
    if len(rows) == 1:
        return "gated_matvec", dict(formats=formats, n=rows[0], output=output, **norm, **sizes)
    return "qkv_matvec", dict(formats=formats, rows=rows, **norm, **sizes)


# --- gemm ---


def gemm_configs(m: int) -> list[GemmConfig]:
    """Returns every tile that is no larger than the activations.

    The model does not see the number of stages.
    """
    return [
        GemmConfig(row_warps, column_warps, tiles, m_tile, 2 if row_warps * tiles > 4 else stages)
        for row_warps, column_warps in ((4, 1), (2, 2), (1, 4))
        for tiles in (1, 2)
        for m_tile, stages in ((16, 4), (32, 3), (64, 2))
        if m_tile <= max(16, m) and m_tile * 4 >= min(m, 64)
    ]


SPACES: dict[str, Space] = {
    space.rule: space
    for space in (
        Space(
            matvec_rule,
            lambda names: _one_matrix(matvec_rule, PRESETS["dp4a"], names, ROWS),
            lambda shape, *_: matvec_configs(shape[3]),
            code_shape=lambda shape: (shape[0], 4096, *shape[2:]),
        ),
        Space(fused_matvec_rule, _fused_shapes, fused_configs, _fused_kernel),
        Space(
            gemm_rule,
            lambda names: _one_matrix(gemm_rule, GemmConfig(), names, PROMPTS),
            lambda shape, *_: gemm_configs(shape[3]),
            code_shape=lambda shape: (shape[0], 4096, 896 if shape[2] % 256 else 4096, 512),
        ),
    )
}
