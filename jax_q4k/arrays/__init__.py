"""Arrays whose last axis is packed into quantization blocks, and views of such arrays."""

from .quantized_array import QuantizedArray, is_quantized

__all__ = ["QuantizedArray", "is_quantized"]
