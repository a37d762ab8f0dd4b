"""Episodes to look at, as two teams played them."""
