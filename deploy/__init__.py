"""Deployment files and the code that generates some of them. Not part of the package."""
