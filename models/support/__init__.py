"""Helpers without a subject of their own; they import nothing else of `models`."""
