"""Machine code of kernels: assembly, disassembly, work, predicted time, and reports."""
