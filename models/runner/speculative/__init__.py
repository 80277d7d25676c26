"""Speculative decoding: draft tokens, and the pass that verifies them."""
