"""Memories of a launch: global, shared and local, every access checked."""
