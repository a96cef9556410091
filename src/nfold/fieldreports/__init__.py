"""The five field reports: grids, tables and published figures."""
