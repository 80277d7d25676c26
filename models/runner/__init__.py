"""Jitted programs of a model and the state that they share; knows no requests or queues."""
