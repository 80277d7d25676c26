"""One command per question, each printing a table: `python -m benchmarks.NAME`."""
