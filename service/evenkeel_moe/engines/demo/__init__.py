"""The demonstration: a controller and a real engine, started, watched, checked and stopped."""
