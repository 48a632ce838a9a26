"""From a target placement to waves of transfers."""
