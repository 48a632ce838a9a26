"""The streams of the ranks."""
