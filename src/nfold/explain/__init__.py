"""Attribution of the missing speedup to causes, by experiment."""
