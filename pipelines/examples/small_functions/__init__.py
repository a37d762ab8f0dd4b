"""Small Python functions to write, for teams that code and test."""
