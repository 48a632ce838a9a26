"""Change detection and load forecasts."""
