"""Code that loads and unpacks packed weights in kernels, shared by the formats."""
