"""Immutable value types that check their invariants."""
