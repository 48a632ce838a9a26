"""The state machines that run in the leading controller."""
