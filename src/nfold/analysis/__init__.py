"""Cells, speedups and comparisons computed from stored measurements."""
