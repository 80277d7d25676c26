"""The operations (JAX primitives), one module each.

A module has the operation's public function, its plain JAX reference, and its composition of PTX
kernels. The functions are exported by `jax_q4k` (`jax_q4k.rms_norm`, ...), but for that of `draw`,
which models call. Nothing is imported here, so that `ops.rms_norm` is the module.
"""

__all__ = ["draw"]
