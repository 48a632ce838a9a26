"""Protocols between the core and the outside world: clock, threads, stores and operations."""
