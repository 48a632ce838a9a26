"""The state machines of the migration protocol: they do no I/O, read no clock and hold no lock."""
