"""A small real expert-parallel engine: a test bed, the demo's engine, and an example for engine
authors.

`config` describes a run, `supervisor` starts and restarts the ranks, `rank` is one rank. It is not
for production serving.
"""
