"""What kernels do with each format: views of packed rows for dot products, and decoders."""

from __future__ import annotations

from . import q4_0, q4_k, q5_0, q5_1, q5_k, q6_k, q8_0
from .packed_row import PackedRow
from .words import Unpack

_MODULES = (q4_k, q5_k, q6_k, q8_0, q5_0, q4_0, q5_1)

PACKED_ROWS: dict[str, type[PackedRow]] = {
    module.FORMAT.name: module.PackedRow for module in _MODULES
}

#: (decoder, threads that decode a block).
DECODERS: dict[str, tuple[Unpack, int]] = {
    module.FORMAT.name: (module.unpack, module.PARTS) for module in _MODULES
}
