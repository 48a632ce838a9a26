"""The reference engine, and adapters to engines."""
