"""Tables, figures and pages from the store."""
