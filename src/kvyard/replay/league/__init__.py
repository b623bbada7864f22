"""Every routing policy on one trace and one fleet, side by side."""

from kvyard.replay.league.league import League, LeaguePlace, league

__all__ = ["League", "LeaguePlace", "league"]
