"""PTX kernels for quantized decoding, written in Python; needs NumPy only.

`kernels` builds them, `simulator` runs their text on the CPU, `machine_code` asks ptxas, `driver`
launches them.
"""

__version__ = "0.1.0"
