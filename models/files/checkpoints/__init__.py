"""Loads Hugging Face checkpoint folders."""
