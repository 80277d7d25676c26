"""Benchmarks, one command per question; each prints a table: `python -m benchmarks.NAME`."""
