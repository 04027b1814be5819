"""Measures what the gateway costs, beside haproxy in front of the same engines; ``python -m benchmarks``."""
