"""Benchmarking: a grid of plans, run one after the other; every result is in the store at once."""
