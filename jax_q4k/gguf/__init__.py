"""GGUF files: a parser that trusts nothing, and tensors loaded packed.

Layout: the GGUF specification (ggml/docs/gguf.md). Enumerations and block sizes are those of the `gguf`
package.
"""

from __future__ import annotations

from ..errors import GGUFError
from .header import Header, parse, read_header
from .load import GGUFFile, read
from .tensors import TensorInfo, supported_types

__all__ = [
    "GGUFError",
    "GGUFFile",
    "Header",
    "TensorInfo",
    "parse",
    "read",
    "read_header",
    "supported_types",
]
