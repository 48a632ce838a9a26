"""Planning cycles of one deployment."""
