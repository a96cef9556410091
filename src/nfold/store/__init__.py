"""The store of measurements."""
