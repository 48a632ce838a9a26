"""The reference engine, the demo, and plugins for serving engines."""
