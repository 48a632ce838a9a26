"""The demo: starts a controller and a real engine, shows them, checks the results, and stops
them."""
