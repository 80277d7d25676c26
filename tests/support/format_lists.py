"""Lists of block formats that tests are parametrized over."""

from __future__ import annotations

import pytest

from ptx_kernels import formats

#: Formats with a tensor-core product, which are the most common in files.
PRODUCTS = tuple(name for name in formats.names() if formats.get(name).int8_tile is not None)
#: The other formats; kernels read them in groups of eight weights.
EIGHTS = tuple(name for name in formats.names() if name not in PRODUCTS)

#: Mark that runs three formats in the quick tier; for tests whose other formats are covered
#: elsewhere.
FEW_ARE_QUICK = pytest.mark.slow(
    "repeats for each format what others do for all of them", quick=["*Q4_K*", "*Q6_K*", "*MXFP4*"]
)
