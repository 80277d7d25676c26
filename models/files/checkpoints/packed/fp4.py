"""4-bit floats (E2M1) in blocks: MXFP4 and NVFP4, which GGUF files hold with the same values.

Sources: OCP Microscaling Formats 1.0; NVIDIA, "Pretraining LLMs with NVFP4", 2025; for the layouts
transformers' integrations/mxfp4.py, compressed-tensors' compressors/nvfp4/, and ModelOpt.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from ..safetensors import DTYPES, Weights
from .base import PackedTensor, pieces

_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_VALUES = np.concatenate((_VALUES, -_VALUES))
_GROUP = {"MXFP4": 32, "NVFP4": 16}  # weights with one scale
_BLOCK = {"MXFP4": 32, "NVFP4": 64}  # weights of a block in GGUF files
#: Format -> types of its scales.
SCALES = {"MXFP4": ("U8", "F8_E8M0"), "NVFP4": ("F8_E4M3",)}
_NAN = {"MXFP4": 0xFF, "NVFP4": 0x7F}  # scales that are no numbers


@dataclasses.dataclass(frozen=True)
class FP4(PackedTensor):
    """A weight in MXFP4 or NVFP4: code * scale, and for NVFP4 times a factor of the tensor.

    Attributes:
      kind: "MXFP4" or "NVFP4".
      codes: name of the codes, two in a byte, the first in the low half.
      scales: name of the scales, (..., k / 32) or (..., k / 16).
      common: name of the factor, or of its reciprocal if `inverse`; None: no factor.
    """

    kind: str = "MXFP4"
    codes: str = ""
    scales: str = ""
    common: str | None = None
    inverse: bool = False

    def floats(self, weights: Weights, rows: slice) -> np.ndarray:
        """See `PackedTensor.floats`."""
        codes, scales = self._read(weights, rows)
        dtype = np.int32 if self.kind == "MXFP4" else np.float32
        scales = scales.view(np.uint8 if self.kind == "MXFP4" else DTYPES["F8_E4M3"]).astype(dtype)
        out = np.empty((*codes.shape[:-1], self.shape[-1]), DTYPES[self.dtype])
        flat, k, group = out.reshape(-1, self.shape[-1]), self.shape[-1], _GROUP[self.kind]
        codes, scales = codes.reshape(len(flat), -1), scales.reshape(len(flat), -1)
        factor = self.factor(weights)
        for piece in pieces(0, len(flat), k):
            values = _VALUES[_nibbles(codes[piece])].reshape(-1, k // group, group)
            with np.errstate(over="ignore"):
                if self.kind == "MXFP4":
                    values = np.ldexp(values, scales[piece][..., None] - 127)
                else:
                    common = np.float32(1) if factor is None else factor
                    values *= (scales[piece] * common)[..., None]
                flat[piece] = values.reshape(-1, k)
        return out

    def blocks(self, weights: Weights, rows: slice) -> np.ndarray:
        """See `PackedTensor.blocks`.

        A block of GGUF has its scales first, and byte j of a group holds weights j and j + half.
        """
        codes, scales = self._read(weights, rows)
        group, block = _GROUP[self.kind], _BLOCK[self.kind]
        of_groups = _nibbles(codes).reshape(*scales.shape, group)
        half = group // 2
        halves = of_groups[..., :half] | of_groups[..., half:] << 4
        leading, per = scales.shape[:-1], block // group
        packed = np.empty((*leading, scales.shape[-1] // per, per + block // 2), np.uint8)
        packed[..., :per] = scales.reshape(*packed.shape[:-1], per)
        packed[..., per:] = halves.reshape(*packed.shape[:-1], block // 2)
        return packed.reshape(*leading, -1)

    def factor(self, weights: Weights) -> np.float32 | None:
        """See `PackedTensor.factor`."""
        if self.common is None:
            return None
        value = np.float32(weights.raw(self.common).reshape(()).item())
        if not (np.isfinite(value) and value > 0):
            weights.fail(self.common, f"is {value}, expected a positive number")
        with np.errstate(over="ignore"):
            factor = np.float32(1 / value) if self.inverse else value
        if not np.isfinite(factor):
            weights.fail(self.common, f"is {value}, whose reciprocal is infinite in float32")
        return factor

    def _read(self, weights: Weights, rows: slice) -> tuple[np.ndarray, np.ndarray]:
        """Returns codes (..., k / 2) and the bytes of the scales (..., groups)."""
        scales: np.ndarray = weights.raw(self.scales, rows).view(np.uint8)
        if self.kind == "NVFP4":
            if (scales > 0x80).any():
                weights.fail(self.scales, "holds negative scales")
            scales = scales & 0x7F  # minus zero
        if (scales == _NAN[self.kind]).any():
            weights.fail(self.scales, "holds a scale that is NaN")
        codes = weights.raw(self.codes, rows)
        return codes.reshape(*scales.shape[:-1], -1), scales


def fp4(
    weights: Weights,
    name: str,
    kind: str,
    codes: str,
    scales: str,
    *,
    common: str | None = None,
    inverse: bool = False,
    further: tuple[str, ...] = (),
) -> FP4:
    """Describes a weight in MXFP4 or NVFP4, after checking the shapes of its parts.

    The arguments are those of `FP4`; `further` are tensors that are skipped with it. Codes are
    (n, k / 2), or for experts (experts, n, k / 32, 16).
    """
    of_codes = weights.expect(codes, ("U8",)).shape
    blocks = len(of_codes) == 4
    if len(of_codes) not in (2, 4) or (blocks and of_codes[3] != 16):
        weights.fail(
            codes, f"has shape {of_codes}, expected (n, k / 2) or (experts, n, blocks, 16)"
        )
    k = of_codes[2] * 32 if blocks else of_codes[1] * 2
    shape = (*of_codes[:2], k) if blocks else (of_codes[0], k)
    if k % _GROUP[kind]:
        weights.fail(codes, f"has rows of {k} weights, no multiple of {_GROUP[kind]}")
    weights.expect(scales, SCALES[kind], (*shape[:-1], k // _GROUP[kind]))
    parts = [codes, scales, *further]
    if common is not None:
        if weights.expect(common, ("F32", "F16", "BF16")).shape not in ((), (1,)):
            weights.fail(common, f"has shape {weights.stored[common].shape}, expected one number")
        parts.append(common)
    dtype = "BF16" if kind == "MXFP4" else "F32"
    format = None if k % _BLOCK[kind] else kind
    label = None if kind == "MXFP4" else kind
    packed = name, shape, dtype, tuple(parts), label, format
    return FP4(*packed, kind, codes, scales, common, inverse)


def _nibbles(codes: np.ndarray) -> np.ndarray:
    """Extracts the codes of bytes: (..., m) to (..., 2 * m)."""
    return np.stack((codes & 15, codes >> 4), axis=-1).reshape(*codes.shape[:-1], -1)
