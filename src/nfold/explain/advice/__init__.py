"""What to change: advice for the user's code."""
