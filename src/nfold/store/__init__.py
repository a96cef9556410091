"""Where measurements are kept: one SQLite file per results folder."""
