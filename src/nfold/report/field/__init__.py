"""The five field reports, each as its own table with today's numbers beside those of then."""
