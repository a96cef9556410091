"""The frameworks: one seam, one folder or file each."""
