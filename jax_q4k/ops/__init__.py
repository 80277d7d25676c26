"""Modules of the primitives, one for each.

A module has the primitive's public function, its plain JAX reference, and its composition of PTX
kernels. The functions are `jax_q4k`'s own names (`jax_q4k.matmul`, ...); nothing is imported here,
so that `ops.matmul` is the module.
"""
