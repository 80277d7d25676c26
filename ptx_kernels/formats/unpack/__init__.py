"""How kernels load and unpack weights; the formats share these readers."""
