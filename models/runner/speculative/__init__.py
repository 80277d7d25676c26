"""Speculative decoding: proposes draft tokens and verifies them in one forward pass."""
