"""The state machines that run inside a rank."""
