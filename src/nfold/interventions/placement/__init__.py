"""Interventions on devices, cores and threads of ranks."""
