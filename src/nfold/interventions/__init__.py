"""Interventions: things that an experiment changes, one file each."""
