"""One deployment on this replica."""
