"""Learning from the stored traces of other runs."""
