"""Reads and writes GGUF files; the reader validates everything and keeps tensors packed.

The layout follows the GGUF specification (ggml/docs/gguf.md). Enumerations and block sizes come
from the `gguf` package.
"""

from __future__ import annotations

from ..errors import GGUFError
from .copying import copy
from .fields import REQUIRED, Fields
from .header import Header
from .load import QUANTIZATION_VERSION, GGUFFile, TensorFile, read
from .metadata import Metadata
from .parts import part_names, read_header
from .tensors import PLAIN, TensorInfo, supported_types
from .write import TensorPieces, write

__all__ = [
    "Fields",
    "GGUFError",
    "GGUFFile",
    "Header",
    "Metadata",
    "PLAIN",
    "QUANTIZATION_VERSION",
    "REQUIRED",
    "TensorFile",
    "TensorInfo",
    "TensorPieces",
    "copy",
    "part_names",
    "read",
    "read_header",
    "supported_types",
    "write",
]
