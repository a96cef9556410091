"""The fast step for a user's own PyTorch script: what stands behind ``nfold.Run``."""
