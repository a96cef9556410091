"""The user API behind ``nfold.Run``."""
