"""Compiled programs on disk, and files that are written whole or not at all."""

__all__ = ["atomic_files", "compiled_files", "program_cache"]
