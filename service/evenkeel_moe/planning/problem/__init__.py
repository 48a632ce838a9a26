"""The placement problem, its metrics and its bounds."""
