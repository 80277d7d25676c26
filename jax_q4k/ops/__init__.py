"""One module per primitive: its public function, its plain JAX reference, its composition of PTX
kernels.

The functions are `jax_q4k`'s own names (`jax_q4k.matmul`, ...); nothing is imported here, so that
`ops.matmul` is the module.
"""
