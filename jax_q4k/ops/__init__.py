"""Modules of the primitives, one for each.

A module has the primitive's public function, its plain JAX reference, and its composition of PTX
kernels. The functions are `jax_q4k`'s own names (`jax_q4k.rms_norm`, ...); nothing is imported
here, so that `ops.rms_norm` is the module.
"""
