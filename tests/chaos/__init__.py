"""Real processes under a seeded schedule of faults: `python -m tests.chaos --seconds 600 --seed 1`.

The simulation (`tests/sim`) tests the protocol; this tests everything around it: sockets, stores,
processes, tasks. docs/testing.md describes the faults and the checks.
"""
