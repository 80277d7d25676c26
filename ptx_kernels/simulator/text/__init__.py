"""Parses PTX text into a program with calls inlined."""
