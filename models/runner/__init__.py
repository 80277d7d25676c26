"""Compiled programs of a model, and the state that they pass on; knows no requests or queues."""
