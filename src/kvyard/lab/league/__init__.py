"""Every routing policy on one trace and one fleet, side by side."""

from kvyard.lab.league.league import League, LeaguePlace, league

__all__ = ["League", "LeaguePlace", "league"]
