"""Works on kernels' machine code: assembly, disassembly, work, predicted time, and reports."""
