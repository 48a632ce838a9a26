"""Frozen value types, no behaviour beyond invariants."""
