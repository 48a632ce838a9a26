"""The operators' view of the deployments, and their changes."""
