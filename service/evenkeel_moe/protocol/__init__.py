"""Sans-IO state machines: no await, no clock, no lock."""
