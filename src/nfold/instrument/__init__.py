"""Instrumentation of an unmodified PyTorch script."""
