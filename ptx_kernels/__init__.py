"""PTX kernels for quantized decoding, written in Python; depends only on NumPy.

`kernels` builds the kernels, `simulator` runs their PTX text on the CPU, `machine_code` runs ptxas
and `driver` launches the kernels.
"""

__version__ = "0.1.0"
