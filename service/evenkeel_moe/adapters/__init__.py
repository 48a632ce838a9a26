"""Adapters: one outside world per file."""
