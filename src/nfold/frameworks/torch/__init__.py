"""PyTorch. Importing this package imports no torch; ``loop`` and the axes do."""
