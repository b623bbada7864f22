"""``kvyard hunt``: drives the scheduler of an installed engine with odd settings and faults, and looks for defects."""
