"""Benchmarks: Ridgeway beside native jax, on the same machine, in the same run. ``make bench`` runs `recovery`."""
