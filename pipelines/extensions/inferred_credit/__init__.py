"""Credit by turn, inferred from whole episodes and their outcomes."""
