"""A game of two counting agents in which nothing but the whole team is paid."""
