"""A small real expert-parallel engine: proving ground, demo and example for engine authors.

`config` holds what a run is, `supervisor` starts and restarts the ranks, `rank` is one rank.
It is not a serving engine.
"""
