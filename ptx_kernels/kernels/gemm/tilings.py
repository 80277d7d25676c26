"""Cost estimates of a tensor-core matmul's tilings, for its selection rules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from ...devices import REFERENCE, Target, tensor_busy
from ...formats import get as block_format
from ...ptx import WARP
from ..quantize_f16 import SUPER_BLOCK
from .config import GemmConfig
from .pipeline import odd_pitch
from .products import pair_pitch

#: Bytes of weights in flight per multiprocessor that keep memory busy: 0.8 us of its share of an
#: H200's bandwidth, plus 10 %.
_IN_FLIGHT = 29 << 10

#: Warps of a multiprocessor for blocks that need more than 128 registers, and for others.
_WARPS, _MANY_WARPS = 8, 16

#: Rows of activations of a thread block up to which a matrix needs no more than 128 registers.
_MANY_ROWS = 32

#: The same for joined matrices of several formats.
_MIXED_ROWS = 8

#: Seconds of a multiprocessor for a row of 256 weights: to unpack it, and per row of activations
#: that is loaded only for it. By the cost model for Q4_K on an H200.
_UNPACK_SECONDS = 2.7e-9
_PRODUCT_SECONDS = {"int8": 0.3e-9, "f16": 0.185e-9}

#: Seconds until a block's ring is full, while another block of its multiprocessor is working.
_BEGIN_SECONDS = 0.4e-6

#: Seconds that a cluster's blocks take to add their sums.
_SPLIT_SECONDS = 2e-6

#: Bytes of 256 activations with their scales and sums or means, see `input_activations`.
_ACTIVATION_BYTES = {"int8": 256 + 64, "f16": 512 + 32 + 4}


@dataclass(frozen=True)
class Shape:
    """Shape of a matmul: matrices of `rows[i]` rows and `formats[i]` each, or a gated pair.

    Attributes:
      device: target of the tiling.
      formats, rows: of the matrices. Two formats for one number of rows are a gated pair, and a
        thread block has the rows of both.
      m: rows of activations.
    """

    device: Target
    formats: tuple[str, ...]
    rows: tuple[int, ...]
    columns: int
    m: int

    @property
    def together(self) -> int:
        """Number of matrices whose rows a thread block computes together."""
        return len(self.formats) // len(self.rows)

    def blocks(self, config: GemmConfig) -> int:
        """Returns the number of thread blocks of the launch."""
        tiles = -(-self.m // config.m_tile)
        return tiles * sum(-(-n // config.rows) for n in self.rows) * config.splits

    def single(self, config: GemmConfig) -> bool:
        """Returns whether each thread block has its own multiprocessor."""
        return self.device.busiest(self.blocks(config), config.splits) == 1

    def seconds(self, config: GemmConfig) -> float:
        """Estimates the launch's seconds from the busiest multiprocessor's time and L2's.

        The larger dominates, but both count in part, because waits are not always hidden.
        """
        rounds = self.device.busiest(self.blocks(config), config.splits)
        met = config.m_tile / (config.tiles * self.together)  # loads of activations per row
        of_row = _UNPACK_SECONDS + met * _PRODUCT_SECONDS[config.products]
        super_blocks = config.steps(self.columns) * config.column_warps
        busiest = rounds * self.together * config.rows * super_blocks * of_row
        busiest /= tensor_busy(self.resident(config) * config.threads // WARP)
        brought = self.blocks(config) * super_blocks * self._block_bytes(config)
        l2 = brought / (self.device.facts or REFERENCE).l2_bandwidth
        split = _SPLIT_SECONDS if config.splits > 1 else 0.0
        return max(busiest, l2) + (busiest + l2) / 8 + rounds * _BEGIN_SECONDS + split

    def _block_bytes(self, config: GemmConfig) -> int:
        """Returns the bytes that a thread block reads per 256 columns."""
        weights = self.together * config.rows * self._super_block
        return weights + config.m_tile * _ACTIVATION_BYTES[config.products]

    def stage_bytes(self, config: GemmConfig) -> int:
        """Returns the bytes of a pipeline stage, for the largest of the formats."""
        return max(stage_bytes(config, (name,) * self.together) for name in self.formats)

    def room(self, config: GemmConfig) -> int:
        """Returns the bytes of shared memory for the pipeline's ring.

        It is all of a multiprocessor's shared memory if a thread block is alone or needs it;
        otherwise several thread blocks share it.
        """
        shared = self.device.common_shared_bytes, self.device.block_shared_bytes
        return shared[0] if self._shares(config) else shared[1]

    def _shares(self, config: GemmConfig) -> bool:
        """Returns whether two thread blocks share a multiprocessor's memory."""
        return not self.single(config) and (
            2 * self.stage_bytes(config) <= self.device.common_shared_bytes
        )

    def resident(self, config: GemmConfig) -> int:
        """Returns the thread blocks that a multiprocessor has at once, by memory and registers."""
        warps = config.threads // WARP
        return min(1 + self._shares(config), max(1, self.most_warps(config) // warps))

    def most_warps(self, config: GemmConfig) -> int:
        """Returns the warps that a multiprocessor may have without spilling registers."""
        rows, pair = _MANY_ROWS, min(block_format(f).tuning.gemm_pair_rows for f in self.formats)
        if self.together > 1:
            rows = pair if config.products == "int8" else 0
        elif len(set(self.formats)) > 1:
            rows = min(pair, _MIXED_ROWS)
        elif len(self.rows) > 1 and config.products == "int8":
            rows = pair
        return _MANY_WARPS if config.tiles == 1 and config.m_tile <= rows else _WARPS

    def widened(self, config: GemmConfig) -> GemmConfig:
        """Returns the Config with more warps per row if a thread block is alone and has few."""
        most = WARP * self.most_warps(config)
        while self.single(config) and config.threads < most and config.column_warps < 8:
            wider = replace(config, column_warps=2 * config.column_warps)
            if self.columns < wider.columns or 2 * self.stage_bytes(wider) > self.room(config):
                break
            config = wider
        return config

    def staged(self, config: GemmConfig) -> GemmConfig:
        """Returns the Config with as many pipeline stages as keep memory busy, if they fit."""
        weights = self.together * config.rows * config.column_warps * self._super_block
        resident = max(1, self.blocks(config) // self.device.multiprocessors)
        # f16 activations are as many bytes as the weights: a block alone waits for both
        slow = config.products == "f16" and self.single(config)
        least = 2 if config.rows > 64 and not slow else 3
        wanted = max(least, 1 + -(-_IN_FLIGHT // (weights * resident)))
        fit = self.room(config) // self.stage_bytes(config)
        return replace(config, stages=max(2, min(wanted, fit, 16)))

    def split(self, configs: Iterable[GemmConfig]) -> Iterator[GemmConfig]:
        """Yields the Configs and, if the device has clusters, variants that split the columns."""
        for config in configs:
            yield config
            if not self.device.clusters:
                continue
            for splits in (2, 4, 8):
                shared = replace(config, splits=splits)
                if config.m_tile % splits == 0 and shared.steps(self.columns) >= 2:
                    yield shared

    def fitting(self, configs: Iterable[GemmConfig]) -> list[GemmConfig]:
        """Returns the Configs whose shared memory has room for two stages.

        f16 products must fit on the device, others on every device since sm_80, or on Turing.
        """

        def room(config: GemmConfig) -> int:
            device = self.device
            most = device.block_shared_bytes, device.common_shared_bytes
            return most[0] if config.products == "f16" else most[1]

        return [c for c in configs if 2 * self.stage_bytes(c) <= room(c)]

    @property
    def _super_block(self) -> int:
        return max(block_format(name).super_block_bytes for name in self.formats)


def stage_bytes(config: GemmConfig, formats: tuple[str, ...]) -> int:
    """Returns the bytes of a pipeline stage for matrices of these formats."""
    layouts = [block_format(name) for name in formats]
    planes = [(p.bytes_per_block, SUPER_BLOCK // f.block_size) for f in layouts for p in f.planes]
    weights = sum(odd_pitch(size * blocks * config.column_warps) for size, blocks in planes)
    if config.products == "f16":
        x = (odd_pitch(512 * config.column_warps) + odd_pitch(32 * config.column_warps)) * (
            config.m_tile
        )
        return config.rows * weights + x + 4 * config.m_tile * config.column_warps
    x = odd_pitch(256 * config.column_warps) * config.m_tile
    return config.rows * weights + x + 8 * config.column_warps * pair_pitch(config.m_tile)
