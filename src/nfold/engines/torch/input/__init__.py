"""Batches on the device: loaders, resident data sets, preprocessing."""
