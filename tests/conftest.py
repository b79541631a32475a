"""Makes `places` importable for the tests of every package."""
