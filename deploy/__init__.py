"""Files that run Evenkeel, and what writes the generated ones; no part of the package."""
