"""Arrays whose last axis is packed into blocks, and views of them."""

from .quantized_array import QuantizedArray, is_quantized

__all__ = ["QuantizedArray", "is_quantized"]
