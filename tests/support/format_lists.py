"""Lists of block formats that tests run over."""

from __future__ import annotations

from ptx_kernels import formats

#: Formats that have a tensor-core product: those that files hold most of.
PRODUCTS = tuple(name for name in formats.names() if formats.get(name).int8_tile is not None)
#: The others, that kernels read by eights.
EIGHTS = tuple(name for name in formats.names() if name not in PRODUCTS)
