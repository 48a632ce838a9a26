"""The demo: runs a controller and a real engine, shows them, and checks the results."""
