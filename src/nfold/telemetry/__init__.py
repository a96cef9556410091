"""What the machine is, and what it does while a run lasts."""
