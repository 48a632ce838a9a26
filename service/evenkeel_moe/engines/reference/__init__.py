"""A small real expert-parallel engine, for tests, the demo, and as an example.

`config` describes a run, `supervisor` starts and restarts the ranks, `rank` is one rank. It is not
for production serving.
"""
