"""The model of the switch in Quint, and traces of the real machines that are checked against it."""
