"""What was measured, for people: tables, figures, one HTML file. Reads the store only."""
