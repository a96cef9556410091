"""Keras 3 behind the seam, on TensorFlow, on JAX and on PyTorch."""
