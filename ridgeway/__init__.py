"""Ridgeway: an open single-controller runtime for JAX that survives the loss of machines."""

__version__ = "0.1.0"
