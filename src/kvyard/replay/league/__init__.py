"""Every routing policy on one trace and one fleet, side by side."""

from kvyard.replay.league.league import League, Standing, league

__all__ = ["League", "Standing", "league"]
