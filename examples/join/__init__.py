"""A toy engine that joins Evenkeel; docs/join.md explains it."""
