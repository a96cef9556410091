"""The result of an explanation as values."""
