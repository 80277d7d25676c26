"""Rule that decides whether to decode a matmul's packed weights to f16 and let XLA multiply."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ...devices import Device, Target
from ...formats import get as block_format
from ...formats.base import BlockFormat
from ...limits import MAX_F16_ROW, MAX_MATRICES, gemm_takes
from ...ptx import KernelError
from ..family import Key, Match, Rule, TableRows
from .rules import FEW_ROWS, f16_products_rule, fused_gemm_rule
from .tilings import Shape

#: Factors by which decoded products must be faster than others of each kind, by these formulas.
#: f16: for prompts of Llama 3.1 8B on an H200, tiles of f16 products take about `Shape.seconds`
#: and decoded ones 1.3 times `_decoded_seconds`; prompts cross near 270 tokens. int8 and f32 were
#: not measured: cuBLAS may reach 600 TFLOP/s where 700 are assumed, and `Shape.seconds` of int8
#: products is 1.4 to 1.6 times the cost model's.
_GAIN = {"f16": 1.4, "int8": 1.8, "f32": 1.25}

#: Seconds of a launch, including the latency of its first bytes.
_LAUNCH_SECONDS = 2.1e-6

#: Tile of cuBLAS (rows of activations, rows of weights) for counting idle multiprocessors. Larger
#: tiles are faster if they fill the device.
_TILE = (128, 128)

#: f16 rows begin at a multiple of 16 bytes.
_ALIGNED = 8


@dataclass(frozen=True)
class DecodedProducts:
    """Whether a matmul decodes its weights first.

    Attributes:
      decoded: True: weights are decoded to f16 in memory, and XLA multiplies them. False:
        tensor-core kernels multiply packed weights, or XLA multiplies float32 ones for unsupported
        formats.
    """

    decoded: bool = False


def decodable(rows: tuple[int, ...], columns: int, matrices: int) -> bool:
    """Returns whether kernels can produce these matrices and their activations as f16."""
    aligned = all(size % _ALIGNED == 0 for size in (*rows, columns))
    return aligned and matrices <= MAX_MATRICES and max(*rows, columns) <= MAX_F16_ROW


def _decoded(
    device: Target, formats: tuple[str, ...], rows: tuple[int, ...], columns: int, m: int
) -> DecodedProducts:
    """Returns whether to decode matrices of `rows` rows each for m rows of activations.

    Two formats for one number of rows are a gated pair. Decoding takes the same time for any m, so
    it pays above some m. There the rate of the matmul decides: `wgmma` in cuBLAS against `mma.sync`
    with unpacking. The alternative for formats without tiles is decoding to float32. On Turing all
    are decoded: our tiles would wait for copies that are not asynchronous there.
    """
    facts = device.facts
    if m <= FEW_ROWS or not decodable(rows, columns, len(formats)):
        return DecodedProducts()
    if device.turing:
        return DecodedProducts(True)
    if facts is None or facts.dot_float_ops is None:
        return DecodedProducts()
    if all(gemm_takes(name, columns) for name in formats):
        products = "f16" if f16_products_rule(device, formats, m) else "int8"
        tiling = fused_gemm_rule(device, formats, rows, columns, m, "f32", products)
        otherwise = Shape(device, formats, rows, columns, m).seconds(tiling)
    else:
        products = "f32"
        otherwise = _float_seconds(facts, formats, rows, columns, m)
    seconds = _decoded_seconds(facts, formats, rows, columns, m)
    return DecodedProducts(seconds * _GAIN[products] < otherwise)


def _each(formats: tuple[str, ...], rows: tuple[int, ...]) -> Iterable[tuple[BlockFormat, int]]:
    """Yields (format, rows) of each matrix; both matrices of a gated pair have the same rows."""
    pair = len(formats) > len(rows)
    return zip(map(block_format, formats), rows * 2 if pair else rows, strict=True)


def _float_seconds(
    facts: Device, formats: tuple[str, ...], rows: tuple[int, ...], columns: int, m: int
) -> float:
    """Predicts the seconds of float32 matmuls, the alternative for formats without tiles."""
    rate = 2 * facts.fp32_lanes * facts.multiprocessors * facts.clock_hz
    seconds = 0.0
    for block, n in _each(formats, rows):
        moved = n * columns * (4 + block.block_bytes / block.block_size)
        seconds += moved / facts.bandwidth + 2 * m * n * columns / rate + 2 * _LAUNCH_SECONDS
    return seconds


def _decoded_seconds(
    facts: Device, formats: tuple[str, ...], rows: tuple[int, ...], columns: int, m: int
) -> float:
    """Predicts the seconds to decode to f16, to multiply, and to scale the results in a pass.

    Results of a gated pair are f16, and the pass writes f16 too; other results are f32.
    """
    pair = len(formats) > len(rows)
    seconds = 0.0
    for block, n in _each(formats, rows):
        decoded = n * columns * (2 + block.block_bytes / block.block_size)
        passed = m * n * (3 if pair else 8)
        seconds += (decoded + passed) / facts.bandwidth + dot_seconds(facts, n, columns, m)
        seconds += 2 * _LAUNCH_SECONDS
    return seconds


def dot_seconds(facts: Device, n: int, columns: int, m: int) -> float:
    """Predicts cuBLAS's seconds for an (m, columns) x (columns, n) matmul, f16 accumulated in f32.

    It is based on `dot_float_ops` and the idle multiprocessors in the last round of tiles.

    Raises:
      ValueError: the device's rate is unknown.
    """
    if facts.dot_float_ops is None:
        raise ValueError(f"{facts.name}: dot_float_ops is not known")
    tiles = -(-m // _TILE[0]) * -(-n // _TILE[1])
    rounds = -(-tiles // facts.multiprocessors)
    of_tile = 2 * _TILE[0] * _TILE[1] * columns * facts.multiprocessors / facts.dot_float_ops
    return rounds * of_tile


def _check_decoded(
    config: DecodedProducts,
    formats: tuple[str, ...],
    rows: tuple[int, ...],
    columns: int,
    m: int,
) -> None:
    if config.decoded and not decodable(rows, columns, len(formats)):
        raise KernelError(
            f"rows={rows} and columns={columns} must be multiples of {_ALIGNED} and at most"
            f" {MAX_F16_ROW} for decoded products, and matrices at most {MAX_MATRICES}"
        )


#: A table's row serves lengths within an octave of its own; the nearest decides.
decoded_products_rule: Rule[DecodedProducts] = Rule(
    "decoded_products",
    _decoded,
    TableRows(
        DecodedProducts,
        dict(
            formats=Key(tuple[str, ...], Match.EQUAL),
            rows=Key(tuple[int, ...], Match.NEAR),
            columns=Key(int, Match.NEAR),
            m=Key(int, Match.NEAR),
        ),
        _check_decoded,
    ),
)
