"""What can die, and how it is made to."""
