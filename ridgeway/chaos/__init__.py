"""Breaking a running cluster on purpose, from a seed."""
