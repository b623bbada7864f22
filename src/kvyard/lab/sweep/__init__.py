"""A trace replayed over a grid of settings, on all cores, and what the answers look like side by side."""

from kvyard.lab.sweep.grid import Grid, GridPoint, make_grid, parse_vary
from kvyard.lab.sweep.run import Failure, Sweep, sweep

__all__ = ["Failure", "Grid", "GridPoint", "Sweep", "make_grid", "parse_vary", "sweep"]
