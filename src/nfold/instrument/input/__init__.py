"""DataLoaders and batch functions of a script."""
