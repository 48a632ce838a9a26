"""Ranks of the simulation that run the real agent, its staging and its transport."""
