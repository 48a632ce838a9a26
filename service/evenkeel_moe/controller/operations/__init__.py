"""What operators read and change through REST."""
