"""Traces replayed through a routed fleet, in virtual time or live, and the report on it."""
