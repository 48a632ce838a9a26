"""Code shared by the plugins for serving engines; each plugin runs as a guest in its engine."""
