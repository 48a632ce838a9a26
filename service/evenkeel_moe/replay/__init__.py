"""Compares policies offline, on recorded traffic."""
