"""``kvyard hunt``: a search for cases that the scheduler of an installed engine gets wrong."""
