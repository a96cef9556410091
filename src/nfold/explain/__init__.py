"""Explaining: one plan under ablations, and where the rest of N-fold went."""
