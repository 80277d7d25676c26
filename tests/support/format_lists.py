"""Lists of block formats that tests run over."""

from __future__ import annotations

import pytest

from ptx_kernels import formats

#: Formats that have a tensor-core product: those that files hold most of.
PRODUCTS = tuple(name for name in formats.names() if formats.get(name).int8_tile is not None)
#: The others, that kernels read by eights.
EIGHTS = tuple(name for name in formats.names() if name not in PRODUCTS)

#: A mark: three formats in the quick tier, where another test has all of them.
FEW_ARE_QUICK = pytest.mark.slow(
    "repeats for each format what others do for all of them", quick=["*Q4_K*", "*Q6_K*", "*MXFP4*"]
)
