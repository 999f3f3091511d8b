"""Sweeps: a recipe, the values that are tried, the number of seeds. The TOML files are the shipped ones."""

from steadygaze.training.sweeps.grid import Cell, Sweep, parse_grid, read_sweep, shipped_sweeps

__all__ = ["Cell", "Sweep", "parse_grid", "read_sweep", "shipped_sweeps"]
