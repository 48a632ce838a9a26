"""The keel policy."""
