"""Start, supervision and end of process trees."""
