"""Interventions on how a device and its host execute a step."""
