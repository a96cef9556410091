"""Somebody's package, whose module is run by ``python -m training.loop``."""
