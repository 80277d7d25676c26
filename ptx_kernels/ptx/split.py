"""Split of a multiprocessor's memory into L1 cache and shared memory, equal for all kernels.

A launch that wants another split than the launch before it may have to wait until the
multiprocessor is idle (CUDA driver API, cuFuncSetCacheConfig). How the driver chooses is not
documented. What is known and assumed:

- The possible sizes are in the CUDA programming guide, compute capabilities. Without a preference
  the driver avoids that shared memory limits occupancy (same guide). It is assumed to choose the
  least size that holds all thread blocks which fit at once.
- XLA prefers the largest size for a function that is launched with dynamic shared memory
  (CU_FUNC_CACHE_PREFER_SHARED in `CudaKernel::UpdateMaxDynamicSharedMemoryBytes` of
  xla/stream_executor/cuda/cuda_kernel.cc), and sets no preference for others.

Kernels without dynamic shared memory therefore declare an array that they do not use, so that
their resident blocks need SPLIT. With dynamic memory instead, L1 would be smallest.
"""

from __future__ import annotations

#: Bytes of shared memory of a multiprocessor. Two blocks of decode attention need more than the
#: next smaller size, and L1 keeps 192 KB on an H200.
SPLIT = 64 << 10
_ENOUGH = 33 << 10  # more than the next smaller size
_RESERVED = 1 << 10  # of each block, for the system
_GRANULE = 128  # bytes
_WARPS, _BLOCKS = 64, 32  # that a multiprocessor holds


def split_bytes(warps: int, resident_blocks: int | None) -> int:
    """Returns the bytes per thread block for which resident blocks together need SPLIT.

    Args:
      warps: of a thread block.
      resident_blocks: least number that registers leave room for; the result serves less than twice
        as many, too. None: more than half of those that `warps` alone allow.
    """
    most = min(_WARPS // warps, _BLOCKS)
    if resident_blocks is None or 2 * resident_blocks > most:
        return SPLIT // most // _GRANULE * _GRANULE - _RESERVED
    return _ENOUGH // resident_blocks - _RESERVED


def half_of_warps(warps: int) -> int:
    """Returns how many thread blocks of `warps` warps are half of the warps that fit at once."""
    return max(1, _WARPS // 2 // warps)
