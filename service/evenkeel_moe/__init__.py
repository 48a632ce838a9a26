"""Evenkeel keeps expert-parallel MoE serving fleets on an even keel."""

__version__ = "0.1.0"
