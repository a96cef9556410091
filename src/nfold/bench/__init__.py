"""Grids and sweeps."""
