"""The GEM policy."""
