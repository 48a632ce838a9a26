"""Reports of the ranks, assembled into windows of load."""
