"""The CRAFT policy."""
