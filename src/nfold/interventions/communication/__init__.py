"""Interventions on the communication between ranks."""
