"""PTX kernels for quantized decoding, written in Python; depends only on NumPy.

`kernels` builds them, `simulator` runs their text on the CPU, `machine_code` runs ptxas and
`driver` launches them.
"""

__version__ = "0.1.0"
