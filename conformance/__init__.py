"""JAX's own tests, natively and through a Ridgeway cluster, side by side: ``python -m conformance.run --help``."""
