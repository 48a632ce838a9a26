"""Offline: compare policies on recorded traffic."""
