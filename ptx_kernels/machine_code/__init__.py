"""Machine code of kernels: assembled, read, its work counted, its time predicted, in tables."""
