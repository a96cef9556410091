"""Running one plan in a fresh process tree, and learning what became of it."""
