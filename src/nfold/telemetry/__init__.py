"""Device and host telemetry."""
