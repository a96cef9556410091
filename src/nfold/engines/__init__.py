"""Engines that train a workload behind one interface."""
