"""Compiled programs of a model and the state they pass on. Knows no request and no queue."""
