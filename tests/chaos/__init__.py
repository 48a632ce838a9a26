"""Real processes under a seeded schedule of faults: `python -m tests.chaos --seconds 600 --seed 1`.

The simulation (`tests/sim`) searches the protocol; this searches everything around it: sockets, stores,
processes, tasks. What is done and what is checked is in docs/chaos.md.
"""
