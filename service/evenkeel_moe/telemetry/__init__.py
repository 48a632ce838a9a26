"""From load reports to complete steps, windows, balance and rank speeds."""
