"""Model <-> protobuf, both ways, pure. What cannot be right is a PeerViolation, never a crash."""
