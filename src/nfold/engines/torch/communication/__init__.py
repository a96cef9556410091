"""Gradient exchange between ranks."""
