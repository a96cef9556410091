"""Values that cross every boundary; standard library only."""
