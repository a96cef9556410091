"""Try remedies on a workload or script, keep those that make it faster, and verify them."""
