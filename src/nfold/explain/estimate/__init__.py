"""Estimates and intervals from trials."""
