"""Seeded simulation of whole deployments: controllers, store, network, ranks, copies and steps."""
