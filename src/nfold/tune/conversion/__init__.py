"""Conversion of a script for one device to nfold.Run."""
