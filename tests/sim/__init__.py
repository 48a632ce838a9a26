"""Seeded simulation of whole fleets: controllers, store, network, ranks, copies and engine steps."""
