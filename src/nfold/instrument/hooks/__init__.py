"""Patches and hooks of PyTorch."""
