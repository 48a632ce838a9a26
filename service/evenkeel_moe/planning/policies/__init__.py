"""Placement policies, each a pure function `plan(problem) -> Proposal`."""
