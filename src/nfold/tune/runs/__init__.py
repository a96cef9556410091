"""Runs of the original and of settings with remedies, and what they show."""
