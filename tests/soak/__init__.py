"""Hostile peers beside an honest fleet, for a long time."""
