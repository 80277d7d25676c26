"""On-disk cache of compiled programs, and atomic file replacement."""

__all__ = ["atomic_files", "compiled_files", "program_cache", "targets"]
