"""Interventions on the input of a step."""
