"""Pure placement functions over numpy."""
