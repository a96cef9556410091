"""One training step: forward, backward, update, CUDA graph capture."""
